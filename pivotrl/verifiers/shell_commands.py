"""What is known about commands that agents use: which options take values, which arguments are paths, where order cannot matter, what is at risk.

The rule: options of a command listed here may be reordered, bundled and written long or short, as its manual (GNU coreutils, findutils,
grep, sed, tar; git; pip; pytest) says. An option that is not listed, and any command that is not listed, keeps its arguments as they are.

The option language, one item per option, separated by blanks: ``n|line-number`` is one flag with two names; ``=`` takes a value; ``/`` takes a
path; ``?`` takes a value only when attached; ``+`` counts repetitions; ``!`` changes only how the output looks and is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from pivotrl.verifiers.shell_nodes import Active, Expanded, Word


class Effect(IntEnum):
    """What running a command may do to the machine, from harmless to irrecoverable."""

    READS = 0
    """Looks only."""
    UNKNOWN = 1
    """Not listed: anything, but nobody said so."""
    WRITES = 2
    """Changes files or state in a way that can be undone or repeated."""
    DESTROYS = 3
    """Deletes or overwrites what may exist nowhere else, or ends processes."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option under its canonical (first) name."""

    name: str
    value: str
    """How it takes a value: empty for a flag, or ``=``, ``/``, ``?``, ``+``, ``!`` of the option language."""


@dataclass(frozen=True, slots=True)
class CommandRule:
    """How the arguments of one command are read."""

    effect: Effect
    options: Mapping[str, Option]
    """By every name, without dashes."""
    conflicts: tuple[str, ...] = ()
    """Groups of one-letter options of which the last one written wins: where two of a group occur, options keep their order."""
    first_path: int | None = None
    """From which operand on the operands are paths; None where they are not."""
    set_from: int | None = None
    """From which operand on the order of operands cannot matter."""
    default_path: Word | None = None
    """The operand that no operand stands for."""
    default_path_needs: str = ""
    """One-letter options without which there is no default path."""
    numeric: str | None = None
    """The option that ``-5`` stands for."""
    permutes: bool = True
    """Options are recognised after operands too. False where the first operand begins another command line."""
    nested_after: int | None = None
    """Number of own operands before a whole command line of another program."""
    pattern_options: str = ""
    """One-letter options that take the place of the first operand, as ``grep -e`` does; with ``e`` among them the operand is that option."""
    is_filter: bool = False
    """Without a file it reads its standard input, to the same output."""
    octal_first: bool = False
    """The first operand may be an octal number."""
    operand_prefix: str = ""
    """Words beginning so are operands, whatever they look like: their place among the operands matters."""
    dashless: bool = False
    """The first argument may bundle options without a dash, as in ``tar xzf``."""
    keeps_separator: bool = False
    """``--`` says more than where options end (git: what follows are paths)."""
    positional: str = ""
    """Options that apply only to the operands after them."""
    keeps_slash: bool = False
    """A slash at the end of a path may change what is done."""
    implied: Mapping[str, str] = field(default_factory=dict[str, str])
    """Value of an option where it is not given."""
    dangerous: str = ""
    """Options (canonical names, separated by blanks) that make the command destructive."""
    writing: str = ""
    """Options that make a command write which otherwise reads."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _options(text: str) -> dict[str, Option]:
    options: dict[str, Option] = {}
    for item in text.split():
        kind = item[-1] if item[-1] in "=/?+!" else ""
        names = item.removesuffix(kind).split("|") if kind else item.split("|")
        options |= dict.fromkeys(names, Option(names[0], kind))
    return options


def _rule(effect: Effect, options: str, **details: object) -> CommandRule:
    return CommandRule(effect, _options(options), **details)  # pyright: ignore[reportArgumentType]


_READS, _WRITES, _DESTROYS, _UNKNOWN = Effect.READS, Effect.WRITES, Effect.DESTROYS, Effect.UNKNOWN

_TERM = {"s": "15"}
_HOME = Expanded((Active("tilde", "~"),))
_GREP = (
    "E|extended-regexp F|fixed-strings G|basic-regexp P|perl-regexp e|regexp= f|file/ i|y|ignore-case v|invert-match w|word-regexp x|line-regexp "
    "c|count L|files-without-match l|files-with-matches m|max-count= o|only-matching q|quiet|silent s|no-messages b|byte-offset H|with-filename "
    "h|no-filename label= n|line-number T|initial-tab Z|null A|after-context= B|before-context= C|context= a|text binary-files= D|devices= "
    "d|directories= exclude= exclude-from= exclude-dir= I include= r|recursive R|dereference-recursive line-buffered U|binary "
    "z|null-data color! colour!"
)
_LS = (
    "a|all A|almost-all author b|escape block-size= B|ignore-backups c C color! d|directory f F|classify? full-time g group-directories-first "
    "G|no-group h|human-readable H i|inode I|ignore= k|kibibytes l L|dereference m n|numeric-uid-gid N|literal o p q Q|quote-name r|reverse "
    "R|recursive s|size S sort= time= t T|tabsize= u U v w|width= x X Z 1 hide= indicator-style="
)
_COPY = "a|archive b d f|force i|interactive l|link L|dereference n|no-clobber P|no-dereference p preserve? R|r|recursive s|symbolic-link S|suffix= "
_COPY += "t|target-directory/ T|no-target-directory u|update? v|verbose x|one-file-system backup? Z strip-trailing-slashes parents"
_LINES = "n|lines= c|bytes= q|quiet|silent v|verbose z|zero-terminated f|follow? F s|sleep-interval= pid= retry"
_LOG = (
    "n|max-count= oneline graph all stat? p|u|patch name-only name-status author= since|after= until|before= grep= S= G= follow decorate? reverse "
    "merges no-merges pretty? format= date= abbrev-commit L= shortstat numstat w|ignore-all-space U|unified= color! no-color!"
)
_DIFF = (
    "cached|staged stat? name-only name-status numstat shortstat p|u|patch w|ignore-all-space b U|unified= color! no-color! no-ext-diff M? C? "
    "word-diff? summary diff-filter= binary exit-code quiet R"
)
_PIP = "r|requirement/ e|editable/ U|upgrade q|quiet+ v|verbose+ user no-deps no-cache-dir pre i|index-url= extra-index-url= t|target/ "
_PIP += "force-reinstall no-build-isolation break-system-packages c|constraint/ y|yes f|find-links= disable-pip-version-check no-input"
_NPM = "g|global D|save-dev O|save-optional E|save-exact S|save no-save legacy-peer-deps force no-audit no-fund silent loglevel= prefix/ production"
_APT = "y|yes|assume-yes q|quiet+ no-install-recommends f|fix-broken reinstall purge allow-downgrades"

_COMPILER = "o/ c E S g? O? W? I= L= D= U= f? m? s? p? v w x="

COMMANDS: Mapping[str, CommandRule] = {
    "ls": _rule(_READS, _LS, conflicts=("tSUvX", "l1Cxm", "aA", "cu"), first_path=0, set_from=0, default_path="."),
    "cat": _rule(
        _READS, "A|show-all b|number-nonblank e E|show-ends n|number s|squeeze-blank t T|show-tabs v|show-nonprinting", first_path=0, is_filter=True
    ),
    "head": _rule(_READS, _LINES, conflicts=("nc", "qv"), first_path=0, numeric="n", implied={"n": "10"}, is_filter=True),
    "tail": _rule(_READS, _LINES, conflicts=("nc", "qv", "fF"), first_path=0, numeric="n", implied={"n": "10"}, is_filter=True),
    "wc": _rule(_READS, "c|bytes m|chars l|lines w|words L|max-line-length", first_path=0, is_filter=True),
    "nl": _rule(_READS, "b|body-numbering= w|number-width= n|number-format= s|number-separator= v= i=", first_path=0, is_filter=True),
    "tac": _rule(_READS, "b r s=", first_path=0, is_filter=True),
    "rev": _rule(_READS, "", first_path=0, is_filter=True),
    "cut": _rule(
        _READS, "b|bytes= c|characters= d|delimiter= f|fields= s|only-delimited complement output-delimiter= z", first_path=0, is_filter=True
    ),
    "tr": _rule(_READS, "c|C|complement d|delete s|squeeze-repeats t|truncate-set1", permutes=False),
    "sort": _rule(
        _READS,
        "b d f|ignore-case g|general-numeric-sort h|human-numeric-sort i M n|numeric-sort R r|reverse V|version-sort c k|key= m o|output/ s|stable "
        "S= t|field-separator= T= u|unique z parallel=",
        first_path=0,
        writing="o",
        is_filter=True,
    ),
    "uniq": _rule(_READS, "c|count d|repeated D f= i|ignore-case s= u|unique w= z", first_path=0, is_filter=True),
    "diff": _rule(
        _READS,
        "u|unified? U= c C= q|brief r|recursive i w|ignore-all-space b B N|new-file y|side-by-side W= s a color! strip-trailing-cr x|exclude=",
        first_path=0,
        conflicts=("uUcCqy",),
    ),
    "cmp": _rule(_READS, "b l s n=", first_path=0),
    "file": _rule(_READS, "b|brief i|mime L z k", first_path=0, set_from=0),
    "stat": _rule(_READS, "c|format= f L t printf=", first_path=0, conflicts=("ct",)),
    "du": _rule(_READS, "a b c d|max-depth= h|human-readable k m s|summarize x L S exclude= apparent-size", first_path=0, default_path="."),
    "df": _rule(_READS, "a h|human-readable H i k T|print-type t= x= m P l total", first_path=0),
    "tree": _rule(_READS, "a d f i L= I= P= p s h D F r t noreport n C! filelimit=", first_path=0, default_path="."),
    "which": _rule(_READS, "a|all", set_from=0),
    "whoami": _rule(_READS, ""),
    "pwd": _rule(_READS, "L P", conflicts=("LP",)),
    "id": _rule(_READS, "u g G n r"),
    "uname": _rule(_READS, "a s n r v m p i o"),
    "hostname": _rule(_READS, "I i f s"),
    "basename": _rule(_READS, "a s="),
    "dirname": _rule(_READS, "z"),
    "realpath": _rule(_READS, "e m s q z", first_path=0),
    "readlink": _rule(_READS, "f e m n", first_path=0),
    "md5sum": _rule(_READS, "b c t", first_path=0),
    "sha256sum": _rule(_READS, "b c t", first_path=0),
    "strings": _rule(_READS, "a f n|bytes= t= e=", first_path=0, numeric="n", is_filter=True),
    "xxd": _rule(_READS, "a b c= E g= i l= p r s= u", first_path=0, is_filter=True),
    "hexdump": _rule(_READS, "b c C d e= n= s= v x", first_path=0, is_filter=True),
    "jq": _rule(_READS, "r|raw-output c|compact-output n|null-input s|slurp S e j M C! R", first_path=1, is_filter=True),
    "grep": _rule(
        _READS,
        _GREP,
        conflicts=("EFGP", "lLcqo", "Hh", "rR"),
        first_path=1,
        numeric="C",
        pattern_options="ef",
        default_path=".",
        default_path_needs="r",
        is_filter=True,
    ),
    "rg": _rule(
        _READS,
        "n|line-number N i|ignore-case l|files-with-matches c|count w|word-regexp v|invert-match F|fixed-strings t|type= T= g|glob= A= B= C= "
        "e|regexp= o m= S|smart-case hidden no-ignore u+ files color! U|multiline P",
        conflicts=("nN", "iS", "lco"),
        first_path=1,
        pattern_options="e",
        default_path=".",
    ),
    "sed": _rule(
        _READS,
        "n|quiet|silent e|expression= f|file/ E|r|regexp-extended i|in-place? s|separate u z|null-data",
        first_path=1,
        pattern_options="ef",
        writing="i",
        is_filter=True,
    ),
    "awk": _rule(_READS, "F|field-separator= v|assign= f|file/", first_path=1, pattern_options="f", permutes=False, is_filter=True),
    "cd": _rule(_READS, "P L e", conflicts=("PL",), first_path=0, default_path=_HOME),
    "mkdir": _rule(_WRITES, "m|mode= p|parents v|verbose", first_path=0),
    "touch": _rule(_WRITES, "a c|no-create m d= r/ t=", first_path=0, set_from=0),
    "cp": _rule(_WRITES, _COPY, conflicts=("fin", "LPd"), first_path=0, keeps_slash=True),
    "mv": _rule(_DESTROYS, _COPY, conflicts=("fin",), first_path=0, keeps_slash=True),
    "ln": _rule(
        _WRITES, "s|symbolic f|force n|no-dereference r|relative v|verbose i T t/", conflicts=("if",), first_path=0, keeps_slash=True, dangerous="f"
    ),
    "chmod": _rule(_WRITES, "c f|silent|quiet v|verbose R|recursive reference=", first_path=1, set_from=1, octal_first=True),
    "chown": _rule(_WRITES, "c f v|verbose R|recursive h reference=", first_path=1, set_from=1),
    "tar": _rule(
        _WRITES,
        "c|create x|extract|get t|list r|append u|update f|file/ C|directory/ z|gzip|gunzip j|bzip2 J|xz v|verbose+ p k exclude= strip-components= "
        "T/ O a|auto-compress h",
        dashless=True,
        positional="C",
        first_path=0,
    ),
    "unzip": _rule(_WRITES, "l o n q+ d/ j p v t u", conflicts=("on", "lpvt"), first_path=0, dangerous="o"),
    "zip": _rule(_WRITES, "r q j 9 u x= v m", first_path=0, dangerous="m"),
    "gzip": _rule(_WRITES, "c d f k l r t v 9 1", first_path=0),
    "gunzip": _rule(_WRITES, "c f k l t v", first_path=0),
    "patch": _rule(_WRITES, "p|strip= i|input/ R|reverse N|forward s dry-run b d/ f", first_path=0),
    "tee": _rule(_DESTROYS, "a|append i", first_path=0, set_from=0),
    "rm": _rule(_DESTROYS, "f|force i I r|R|recursive d|dir v|verbose", conflicts=("fiI",), first_path=0, set_from=0),
    "rmdir": _rule(_DESTROYS, "p|parents v|verbose ignore-fail-on-non-empty", first_path=0),
    "unlink": _rule(_DESTROYS, "", first_path=0),
    "shred": _rule(_DESTROYS, "f n= u z v", first_path=0),
    "truncate": _rule(_DESTROYS, "s|size= c r/", first_path=0, set_from=0),
    "dd": _rule(_DESTROYS, "", set_from=0),
    **{name: _rule(_DESTROYS, "t=") for name in ("mkfs", "mkfs.ext4", "mkfs.xfs", "fdisk", "parted", "wipefs", "dropdb", "userdel")},
    "kill": _rule(_DESTROYS, "s|signal= l L", numeric="s", set_from=0, implied=_TERM),
    "pkill": _rule(_DESTROYS, "f|full s|signal= x u= n o P=", numeric="s", implied=_TERM),
    "killall": _rule(_DESTROYS, "s|signal= i I v w q", numeric="s", set_from=0, implied=_TERM),
    "shutdown": _rule(_DESTROYS, "h r c P H"),
    "reboot": _rule(_DESTROYS, "f"),
    "rsync": _rule(
        _WRITES, "a|archive v|verbose+ z r n|dry-run P delete exclude= include= e= q h u progress", first_path=0, keeps_slash=True, dangerous="delete"
    ),
    "curl": _rule(
        _UNKNOWN,
        "s|silent S|show-error L|location f|fail o|output/ O|remote-name k|insecure X|request= H|header= d|data= data-raw= data-binary= I|head i v "
        "u|user= m|max-time= retry= x= A= b= c= F= G compressed connect-timeout= w|write-out=",
    ),
    "wget": _rule(_UNKNOWN, "q|quiet O|output-document/ c P|directory-prefix/ T|timeout= t|tries= no-check-certificate S r l="),
    "pytest": _rule(
        _UNKNOWN,
        "x|exitfirst v|verbose+ s q|quiet+ l|showlocals k= m= n= p= c/ o= W= r= tb= maxfail= lf|last-failed ff|failed-first no-header "
        "co|collect-only durations= cov? cov-report= rootdir/ ignore/ timeout= no-cov cache-clear sw color! capture= disable-warnings strict-markers",
        first_path=0,
    ),
    "python": _rule(_UNKNOWN, "c= m= u B O E I s S q v+ W= X= V|version i", permutes=False),
    "python3": _rule(_UNKNOWN, "c= m= u B O E I s S q v+ W= X= V|version i", permutes=False),
    "make": _rule(_UNKNOWN, "j|jobs= C|directory/ f|file/ k B s n"),
    "gcc": _rule(_UNKNOWN, _COMPILER, operand_prefix="-l"),
    "g++": _rule(_UNKNOWN, _COMPILER, operand_prefix="-l"),
    "cc": _rule(_UNKNOWN, _COMPILER, operand_prefix="-l"),
    "clang": _rule(_UNKNOWN, _COMPILER, operand_prefix="-l"),
    "source": _rule(_UNKNOWN, "", first_path=0, permutes=False),
    "pip install": _rule(_WRITES, _PIP, set_from=0),
    "pip uninstall": _rule(_WRITES, _PIP, set_from=0),
    "pip list": _rule(_READS, "o|outdated format= not-required l user v+ q+"),
    "pip show": _rule(_READS, "f|files v+ q+", set_from=0),
    "pip freeze": _rule(_READS, "l|local user all"),
    "npm install": _rule(_WRITES, _NPM, set_from=0),
    "npm ci": _rule(_WRITES, _NPM),
    "apt-get install": _rule(_WRITES, _APT, set_from=0),
    "apt-get update": _rule(_WRITES, _APT),
    "apt-get remove": _rule(_WRITES, _APT, set_from=0),
    "git status": _rule(_READS, "s|short b|branch porcelain? u|untracked-files? v+ long ignored? z", keeps_separator=True),
    "git log": _rule(_READS, _LOG, numeric="n", keeps_separator=True),
    "git show": _rule(_READS, _LOG, numeric="n", keeps_separator=True),
    "git diff": _rule(_READS, _DIFF, keeps_separator=True),
    "git blame": _rule(_READS, "L= w M? C? s e l t", keeps_separator=True),
    "git add": _rule(_WRITES, "A|all u|update f|force n|dry-run v|verbose N p i", first_path=0, set_from=0),
    "git commit": _rule(_WRITES, "a|all m|message= q|quiet v amend no-edit allow-empty no-verify s|signoff F/ author= date=", dangerous="amend"),
    "git checkout": _rule(_DESTROYS, "b= B= f|force q|quiet t detach", keeps_separator=True),
    "git switch": _rule(_WRITES, "c|create= C= f|force discard-changes q|quiet d|detach", dangerous="f discard-changes C"),
    "git restore": _rule(_DESTROYS, "S|staged W|worktree s|source= q|quiet", first_path=0),
    "git reset": _rule(_WRITES, "hard soft mixed q|quiet keep merge", keeps_separator=True, dangerous="hard keep merge"),
    "git clean": _rule(_DESTROYS, "f|force+ d x X n|dry-run q|quiet e= i", keeps_separator=True),
    "git stash": _rule(_WRITES, "", permutes=False),
    "git rm": _rule(_DESTROYS, "r f|force cached n q", first_path=0, set_from=0),
    "git mv": _rule(_DESTROYS, "f k n v", first_path=0),
    "git push": _rule(_WRITES, "f|force u|set-upstream tags d|delete force-with-lease? q all", dangerous="f d force-with-lease"),
    "git pull": _rule(_WRITES, "rebase? ff-only q no-rebase"),
    "git fetch": _rule(_WRITES, "a|all p|prune t|tags q depth= unshallow"),
    "git clone": _rule(_WRITES, "depth= b|branch= q|quiet single-branch recursive recurse-submodules? bare o="),
    "git branch": _rule(_WRITES, "a|all r|remotes v|verbose+ d D m M f show-current list l", dangerous="D M f"),
    "git apply": _rule(_WRITES, "R|reverse check stat p= 3|3way index cached v whitespace= reject", first_path=0),
    "git rev-parse": _rule(_READS, "short? abbrev-ref? show-toplevel verify q"),
    "git ls-files": _rule(_READS, "c d m o s exclude-standard z t", keeps_separator=True),
    "git grep": _rule(_READS, _GREP, conflicts=("EFGP", "lLcqo", "Hh"), pattern_options="ef", keeps_separator=True),
    "docker run": _rule(
        _UNKNOWN,
        "i|interactive t|tty d|detach rm v|volume= p|publish= e|env= w|workdir= name= network= u|user= entrypoint= privileged mount= env-file= "
        "l|label= m|memory= cpus= gpus= restart= platform= h|hostname= init pull=",
        permutes=False,
        nested_after=1,
    ),
    "docker exec": _rule(_UNKNOWN, "i|interactive t|tty d|detach e|env= w|workdir= u|user= privileged", permutes=False, nested_after=1),
    "docker ps": _rule(_READS, "a|all q|quiet f|filter= format= l|latest n|last= no-trunc s|size"),
    "docker logs": _rule(_READS, "f|follow t|timestamps n|tail= since= until="),
    "docker build": _rule(_WRITES, "t|tag= f|file/ build-arg= no-cache pull q|quiet target= platform=", first_path=0),
    "docker rm": _rule(_DESTROYS, "f|force v|volumes l", set_from=0),
    "docker rmi": _rule(_DESTROYS, "f|force", set_from=0),
    "sudo": _rule(_UNKNOWN, "E|preserve-env n u|user= H S i s", permutes=False, nested_after=0),
    "time": _rule(_UNKNOWN, "p v", permutes=False, nested_after=0),
    "nohup": _rule(_UNKNOWN, "", permutes=False, nested_after=0),
    "nice": _rule(_UNKNOWN, "n|adjustment=", permutes=False, nested_after=0, numeric="n"),
    "timeout": _rule(_UNKNOWN, "s|signal= k|kill-after= foreground preserve-status v", permutes=False, nested_after=1),
    "xargs": _rule(
        _UNKNOWN,
        "0|null a/ d|delimiter= I= n|max-args= P|max-procs= r|no-run-if-empty t L= p x s=",
        permutes=False,
        nested_after=0,
    ),
    "stdbuf": _rule(_UNKNOWN, "i|input= o|output= e|error=", permutes=False, nested_after=0),
    "command": _rule(_UNKNOWN, "v V p", permutes=False, nested_after=0),
    "exec": _rule(_UNKNOWN, "", permutes=False, nested_after=0),
    "bash": _rule(_UNKNOWN, "c l|login e x i u", permutes=False),
    "sh": _rule(_UNKNOWN, "c l e x i u", permutes=False),
    "zsh": _rule(_UNKNOWN, "c l e x i u", permutes=False),
}
"""By command name, or by command and subcommand."""

ALIASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "egrep": ("grep", ("-E",)),
    "fgrep": ("grep", ("-F",)),
    "gawk": ("awk", ()),
    ".": ("source", ()),
}
"""Commands that are another command with options."""

SUBCOMMAND_PROGRAMS: Mapping[str, Mapping[str, Option]] = {
    "git": _options("C/ c= no-pager! P! p|paginate! git-dir/ work-tree/"),
    "pip": _options("q|quiet+ v+ disable-pip-version-check! no-input no-cache-dir"),
    "pip3": _options("q|quiet+ v+ disable-pip-version-check! no-input no-cache-dir"),
    "apt-get": _options("y|yes|assume-yes q|quiet+"),
    "apt": _options("y|yes|assume-yes q|quiet+"),
    "docker": _options(""),
    "npm": _options(""),
}
"""Programs whose first operand names a subcommand, and the options that may stand before it."""

SHARED_SUBCOMMANDS: Mapping[str, str] = {"pip3": "pip", "apt": "apt-get"}
"""Programs whose subcommands are read by another program's rules; their names stay different."""

SIGNALS: Mapping[str, str] = {"HUP": "1", "INT": "2", "QUIT": "3", "KILL": "9", "USR1": "10", "USR2": "12", "TERM": "15", "CONT": "18", "STOP": "19"}
"""Linux numbers of signals, by name."""

SHELLS = frozenset({"bash", "sh", "zsh"})
"""Programs whose ``-c`` operand is a script."""

QUESTIONS = _names("ls stat file grep rg diff cmp which find test") | {"git diff", "git grep", "git status", "git rev-parse"}
"""Commands whose exit status is an answer: what follows ``&&`` depends on it."""

INTERACTIVE = _names(
    "vim vi nvim nano emacs less more man top htop ssh telnet ftp sftp psql mysql sqlite3 mongo redis-cli gdb lldb pdb irb node ghci screen tmux "
    "python python3 ipython ipython3 R julia bc"
)
"""Programs that read what is typed next. Those in `BATCH_WITH_OPERANDS` do so only when started without operands."""

BATCH_WITH_OPERANDS = _names("python python3 ipython ipython3 node R julia bc irb")
