"""Pairs of shell commands that do the same and that do not, as an agent's operator would say; each is one row of the verifier's behaviour."""

from __future__ import annotations

import pytest

from pivotrl.verifiers.shell_tree import canonical_command

EQUAL = [
    # Quotes, escapes, blanks, comments.
    ("ls -la 'src'", 'ls -la "src"'),
    ("ls -la 'src'", "ls   -la  src"),
    ("cat 'my file.txt'", "cat my\\ file.txt"),
    ("cat 'it'\\''s'", 'cat "it\'s"'),
    ('cat a"b"c', "cat abc"),
    ("'ls' -l", "ls -l"),
    ("\\ls -l", "ls -l"),
    ("printf 'a\\tb'", 'printf "a\\tb"'),
    ("echo $'a\\tb'", "echo 'a\tb'"),
    ("grep \\$x f", "grep '$x' f"),
    ("find . -name \\*.py", 'find . -name "*.py"'),
    ("ls  # look around", "ls"),
    ("# look around\nls", "ls"),
    ("python \\\n  -m pytest \\\n  tests", "python -m pytest tests"),
    ('echo "a\\\nb"', "echo ab"),
    ("", "  # nothing"),
    # Statements.
    ("a; b", "a\nb"),
    ("a;", "a"),
    ("a;b;", "a\n\n b\n"),
    ("a&&b", "a && \\\n b"),
    ("a &&\n b", "a && b"),
    ("a |\n b", "a | b"),
    ("a & b", "a &\nb"),
    ("{ a; }", "a"),
    ("if a; then b; fi", "if a\nthen\n    b\nfi"),
    ("for i in 1 2; do echo $i; done", "for i in 1 2\ndo\n  echo ${i}\ndone"),
    ("while read x; do a; done < f", "while read x\ndo a\ndone <f"),
    ("if [ -f x ]; then a; fi", "if test -f x; then a; fi"),
    ("[ 'a' = \"$b\" ] && c", '[ a = "$b" ] && c'),
    ("case $1 in a) x;; esac", "case $1 in\n a)\n x\n ;;\nesac"),
    ("f() { a; b; }", "f ( ) {\n a\n b\n}"),
    ("export A=1 B=2", "export A=1; export B=2"),
    ("A=1 B=2 make", "B='2' A=1 make"),
    # Expansions.
    ("echo ${x}", "echo $x"),
    ('echo "${x}y"', 'echo "$x"y'),
    ("X=$Y", 'X="$Y"'),
    ("X=$(ls -la)", 'X="`ls -al`"'),
    ("export PATH=$PATH:/a", 'export PATH="${PATH}:/a"'),
    ("echo $(ls -la)", "echo `ls -a -l`"),
    ("exit $?", 'exit "$?"'),
    ("echo $((1+2))", "echo $(( 1 + 2 ))"),
    ("diff <(ls -la a) b", "diff <( ls -al a ) b"),
    # Redirections and here-documents.
    ("a > f 2>&1", "a &> f"),
    ("a > f 2>&1", "a >& f"),
    ("a |& b", "a 2>&1 | b"),
    ("> f a b", "a b >f"),
    ("a > f b", "a b > f"),
    ("a 1>f", "a > f"),
    ("a 2> e > f", "a >f 2>e"),
    ("make 2>&1", "make"),
    ("cat <<EOF\nx\nEOF", "cat <<'END'\nx\nEND"),
    ("cat > f <<'EOF'\n$x\nEOF", 'cat <<"EOF" > f\n$x\nEOF'),
    ("cat <<-EOF\n\tx\n\tEOF", "cat <<EOF\nx\nEOF"),
    ("cat > f <<EOF && ls -la\nx\nEOF", "cat <<EOF > f && ls -al\nx\nEOF"),
    ("cat <<EOF | grep -in x\ny\nEOF", "cat <<EOF | grep -ni x\ny\nEOF"),
    ("python - <<'EOF'\nprint(1)\nEOF", "python << EOF\nprint(1)\nEOF"),
    # Options.
    ("ls -la", "ls -al"),
    ("ls -l -a", "ls --all -l"),
    ("ls src -l", "ls -l src"),
    ("rm -rf x", "rm -fr x"),
    ("rm -r -f x", "rm --force -R x"),
    ("grep -rn foo src", "grep -n -r -e foo src"),
    ("grep -rn foo .", "grep -rn foo"),
    ("grep foo src -rn --include=*.py", "grep -rn --include='*.py' foo src"),
    ("grep -A3 -i x f", "grep --ignore-case --after-context=3 x f"),
    ("egrep 'a|b' f", "grep -E 'a|b' f"),
    ("head -5 f", "head -n 5 f"),
    ("head --lines=5 f", "head -n5 f"),
    ("tail f", "tail -n 10 f"),
    ("tail -n +5 f", "tail --lines +5 f"),
    ("sed -n '1,5p' f", "sed -n -e 1,5p f"),
    ("sed -i s/a/b/ f", "sed --in-place 's/a/b/' f"),
    ("sed -r 's/(a)/b/' f", "sed -E 's/(a)/b/' f"),
    ("sort -rn f", "sort -n -r f"),
    ("sort -k 2 -t, f", "sort -t ',' -k2 f"),
    ("tar xzf a.tgz", "tar -x -z -f a.tgz"),
    ("tar -C d -xzf a.tgz", "tar xzf a.tgz -C d"),
    ("mkdir -p a/b", "mkdir --parents a/b/"),
    ("cp -r a b", "cp -R a b"),
    ("chmod 755 f", "chmod 0755 ./f"),
    ("kill -9 12", "kill -KILL 12"),
    ("kill -s SIGTERM 12", "kill 12"),
    ("make -j4", "make -j 4"),
    ("curl -sSL -o f http://x/y", "curl -L -s -S http://x/y --output f"),
    ("gcc -O2 -o app a.c b.c", "gcc a.c b.c -o app -O2"),
    ("pip install -q a b", "pip install b a --quiet"),
    ("pip install -r req.txt", "pip install --requirement=./req.txt"),
    ("apt-get install -y a", "apt-get -y install a"),
    ("pytest -xvs t.py", "pytest t.py -s -x -v"),
    ("pytest --tb short t.py", "pytest t.py --tb=short"),
    ("python -m pytest -x t.py -q", "python -m pytest t.py -xq"),
    ("docker run --rm -it i sh", "docker run -i -t --rm i sh"),
    # Commands inside commands.
    ("sudo ls -la", "sudo ls -al"),
    ("timeout 5 grep -rn x .", "timeout 5 grep -nr x ."),
    ("xargs grep -ln x", "xargs grep -l -n x"),
    ("bash -c 'ls -la'", 'bash -c "ls -al"'),
    ("env A=1 ls -la", "env A=1 ls -al"),
    ("nohup python a.py > log 2>&1 &", "nohup python ./a.py &> log &"),
    ("cat f | grep x", "grep x f"),
    ("cat f | grep x | head -3", "grep x < f | head -n 3"),
    ("cat < f", "cat f"),
    # Git.
    ("git diff --cached", "git diff --staged"),
    ("git log -5 --oneline", "git log --oneline -n 5"),
    ("git commit -am x", "git commit -m 'x' --all"),
    ("git --no-pager diff", "git diff"),
    ("git checkout -b x", "git switch -c x"),
    ("git checkout -- a.py", "git restore ./a.py"),
    ("git add b a", "git add a b"),
    # Find.
    ("find . -type f -name '*.py'", "find -name '*.py' -type f"),
    ("find . -maxdepth 2 -name a", "find . -name a -maxdepth 2"),
    ("find ./src/ -name a -print", "find src -name a"),
    # Paths and directories.
    ("cat ./a", "cat a"),
    ("cat a//b/./c", "cat a/b/c"),
    ("ls src/", "ls src"),
    ("ls ~/", "ls ~"),
    ("ls ./*.py", "ls *.py"),
    ("cd /app/", "cd /app"),
    ("cd", "cd ~"),
    ("cd /app && cat a", "cd /app && cat /app/a"),
    ("cd /app && cd src && cat a", "cd /app && cd /app/src && cat /app/src/a"),
    (". ./venv/bin/activate", "source venv/bin/activate"),
    ("echo a   b", "echo 'a b'"),
]

DIFFERENT = [
    # The public rule's holes: word overlap, concatenated keystrokes.
    ("rm -rf /tmp x", "ls -la /tmp"),
    ("ls /tmp", "rm /tmp"),
    ("cat notes.txt", "cat notes.txt notes.txt"),
    ("ls\npwd", "lspwd"),
    ("git push origin main", "git push --force origin main"),
    ("git reset HEAD", "git reset --hard HEAD"),
    ("git stash", "git stash drop"),
    ("sed -n 's/a/b/' f", "sed -i 's/a/b/' f"),
    ("echo rm -rf x", "rm -rf x"),
    ("find . -name a", "find . -name a -delete"),
    ("cp a b", "mv a b"),
    ("kill 12", "kill -9 12"),
    ("kill -9 12", "kill -9 -1"),
    ("dd if=a of=b", "dd if=b of=a"),
    ("sort a > b", "sort b > a"),
    ("tee f", "tee -a f"),
    ("truncate -s 0 f", "stat f"),
    # Statements.
    ("a; b", "a && b"),
    ("a && b", "a || b"),
    ("a | b", "a || b"),
    ("a; b", "b; a"),
    ("a & b", "a; b"),
    ("! a", "a"),
    ("(cd x; a)", "cd x; a"),
    ("{ a; b; } > f", "a; b > f"),
    ("a && b > f | c", "(a && b > f) | c"),
    ("if a; then b; fi", "if a; then c; fi"),
    ("if a; then b; fi", "if ! a; then b; fi"),
    ("for i in 1 2; do a; done", "for i in 2 1; do a; done"),
    ("while a; do b; done", "until a; do b; done"),
    ("test -f x", "test -d x"),
    ("[ -f x ]", "[[ -f x ]]"),
    # Quotes and expansions.
    ("ls *", "ls '*'"),
    ("echo $x", "echo '$x'"),
    ("cat $x", 'cat "$x"'),
    ("cat $x", "cat $y"),
    ("ls ~", "ls '~'"),
    ("ls {a,b}", "ls '{a,b}'"),
    ("ls {'a,b',c}", "ls {a,b,c}"),
    ("ls [ab]", "ls '[ab]'"),
    ("ls ['a-c']", "ls [a-c]"),
    ("echo `a`", "echo '`a`'"),
    ("echo $(a)", "echo $(b)"),
    ("cat a b", "cat 'a b'"),
    ("ls\u00a0-la", "ls -la"),
    ("ls\u2028-la", "ls -la"),
    ("echo ${x:-a}", "echo ${x:-b}"),
    ("find . -name *.py", "find . -name '*.py'"),
    ("curl http://x?a=1&b=2", "curl 'http://x?a=1&b=2'"),
    ('echo "\\n"', "echo \\n"),
    ("X=1", "export X=1"),
    ("A=1 A=2 x", "A=2 A=1 x"),
    # Redirections.
    ("a > f", "a >> f"),
    ("a > f", "a 2> f"),
    ("a 2>&1 > f", "a > f 2>&1"),
    ("a 2>&1 | b", "a | b"),
    ("X=$(a 2>&1)", "X=$(a)"),
    ("a > f", "a < f"),
    ("cat <<EOF\n$x\nEOF", "cat <<'EOF'\n$x\nEOF"),
    ("cat <<EOF\nx\nEOF", "cat <<EOF\n x\nEOF"),
    ("cat <<EOF\nx\nEOF", "cat <<EOF\nx\n\nEOF"),
    ("cat <<EOF\n\tx\nEOF", "cat <<-EOF\n\tx\nEOF"),
    ("cat > f <<EOF\nx\nEOF", "cat > g <<EOF\nx\nEOF"),
    ("cat <<< a", "cat a"),
    # Options.
    ("ls -l", "ls -a"),
    ("ls -l", "ls l"),
    ("ls -- -a", "ls -a"),
    ("rm -i -f x", "rm -f -i x"),
    ("grep -E -F x f", "grep -F -E x f"),
    ("grep -n x f", "grep -c x f"),
    ("grep x f", "grep f x"),
    ("grep -e a -f b c", "grep -e b -f a c"),
    ("head -n 5 f", "head -c 5 f"),
    ("head f", "head -n 11 f"),
    ("tail -n 5 f", "tail -n +5 f"),
    ("sort -t , -k 2 f", "sort -t 2 -k , f"),
    ("pytest -v t.py", "pytest -vv t.py"),
    ("pytest -k a t.py", "pytest -k b t.py"),
    ("tar xzf a.tgz", "tar czf a.tgz"),
    ("tar -cf a.tar x -C d y", "tar -C d -cf a.tar x y"),
    ("gcc a.c -lm", "gcc -lm a.c"),
    ("make test clean", "make clean test"),
    ("unknown -a -b", "unknown -b -a"),
    ("unknown -ab", "unknown -a -b"),
    ("ls --frobnicate -l", "ls -l --frobnicate"),
    ("python -c 'a'", "python -c 'b'"),
    ("python a.py -v", "python -v a.py"),
    ("python a.py", "python3 a.py"),
    ("./a", "a"),
    ("bash a.sh", "source a.sh"),
    ("bash -c a", "bash a"),
    ("xargs grep -r x", "xargs grep -r x ."),
    ("sudo a", "a"),
    ("timeout 5 a", "timeout 50 a"),
    ("docker run i -it", "docker run -it i"),
    ("cat a b | grep x", "grep x a b"),
    ("cat f | grep -r x", "grep -r x f"),
    ("cat f | tee g", "tee g f"),
    # Git.
    ("git diff a", "git diff -- a"),
    ("git diff", "git diff --cached"),
    ("git checkout a", "git checkout -b a"),
    ("git checkout HEAD -- a", "git restore a"),
    ("git commit -m a", "git commit -m b"),
    ("git commit -m a", "git commit --amend -m a"),
    ("git -C a status", "git status"),
    ("git log -n 5", "git log -n 6"),
    # Find.
    ("find . -name a -o -name b", "find . -name b -o -name a -type f"),
    ("find . -mtime +7", "find . -mtime -7"),
    ("find . -name a -exec rm {} ;", "find . -name a -exec rm {} \\;"),
    ("find . ! -name a -type f", "find . ! -type f -name a"),
    ("find a b", "find b a"),
    # Paths and directories.
    ("cat a/../b", "cat b"),
    ("cat /a", "cat a"),
    ("cp a b/", "cp a b"),
    ("cat -- -a", "cat -a"),
    ("cd a && ls", "cd b && ls"),
    ("cd /a && cat b", "cat /a/b"),
    ("(cd x; cat y)", "(cd x; cat /app/y)"),
    ("cd /app && (cd x; cat y)", "cd /app && (cd x; cat /app/y)"),
    ("cd /app || cat a", "cd /app || cat /app/a"),
    ("mv a b", "mv b a"),
    ("ln -s a b", "ln -s b a"),
    ("echo a", "echo -n a"),
    ("echo 'a  b'", "echo a b"),
]

UNREADABLE = [
    "echo 'open",
    'echo "open',
    "cat <<EOF\nno end",
    "a &&",
    "(a",
    "if a; then b",
    "a | | b",
    "cat <<EOF &&\nx\nEOF\nls",
    "cat <<EOF |\nx\nEOF\nwc",
    "cat <<A <<B\n1\nA\n2\nB",
    "nul\0byte",
    "carriage\rreturn",
    "lone \ud800",
    "a 0<f",
    "a\\\nb",
    "echo 'q'\"w\"\\ r",
    "$'\\xff'",
    "cat <<EOF\nx\nEOF \nEOF2",
    "x" * 70_000,
    "$(" * 60 + "a" + ")" * 60,
]


@pytest.mark.parametrize(("first", "second"), EQUAL, ids=[f"{a!r}={b!r}" for a, b in EQUAL])
def test_equal(first: str, second: str) -> None:
    left, right = canonical_command(first), canonical_command(second)
    assert left is not None
    assert left == right
    assert hash(left) == hash(right)


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=[f"{a!r}!{b!r}" for a, b in DIFFERENT])
def test_different(first: str, second: str) -> None:
    left, right = canonical_command(first), canonical_command(second)
    assert left is not None
    assert right is not None
    assert left != right


@pytest.mark.parametrize("text", UNREADABLE, ids=[repr(text[:40]) for text in UNREADABLE])
def test_what_is_not_certain_has_no_form(text: str) -> None:
    assert canonical_command(text) is None


FRESH_EQUAL = [
    ("cd /testbed && python a.py", "python a.py"),
    ("cd /testbed; make", "make"),
    ("cd /testbed/src && cat a.py", "cat src/a.py"),
    ("cd src && cat a.py", "cat /testbed/src/a.py"),
    ("cd src && cd .. && make", "make"),
    ("cd /testbed && ls", "ls /testbed"),
    ("git status", "cd /testbed/ && git status"),
]
FRESH_DIFFERENT = [
    ("cd src && make", "make"),
    ("cd src && python a.py", "python src/a.py"),
    ("cd src; make", "cd src && make"),
    ("cd $X && make", "make"),
    ("cd /testbed || exit 1; make", "make"),
    ("cd /testbed & make", "make"),
    ("cd src", "cd lib"),
]


@pytest.mark.parametrize(("first", "second"), FRESH_EQUAL)
def test_equal_where_each_command_has_its_own_shell(first: str, second: str) -> None:
    assert canonical_command(first, "/testbed") == canonical_command(second, "/testbed")
    assert canonical_command(first) != canonical_command(second), "a shell that goes on is elsewhere afterwards"


@pytest.mark.parametrize(("first", "second"), FRESH_DIFFERENT)
def test_different_where_each_command_has_its_own_shell(first: str, second: str) -> None:
    assert canonical_command(first, "/testbed") != canonical_command(second, "/testbed")
