"""Hostile programs in the sandbox: each is stopped or sees nothing, and leaves nothing behind. Skips where the machine permits no sandbox."""

from __future__ import annotations

import contextlib
import gzip
import os
import socket
import threading
import uuid
from pathlib import Path

import pytest

from pivotrl.config.shell_effect import SandboxLimits
from pivotrl.errors import UserError
from pivotrl.verifiers.sandbox import runner
from pivotrl.verifiers.sandbox.runner import Effect, Fixture, Sandbox, SandboxRefused, is_runnable

LIMITS = SandboxLimits(deadline_s=15.0, cpu_s=1, memory_mb=64, processes=8, file_mb=1, output_kb=16, disk_mb=4, max_files=256)
EMPTY = Fixture(())


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(LIMITS)
    except UserError as error:
        pytest.skip(str(error))


def run(sandbox: Sandbox, script: str, fixture: Fixture = EMPTY) -> Effect:
    return sandbox.run(["/bin/bash", "-c", script], fixture)


def running(marker: str) -> list[str]:
    """Command lines of processes of this machine that carry a marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if marker in text and path.parent.name != str(os.getpid()):
            found.append(text)
    return found


def test_files_output_and_status_come_back(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("one\n")
    (tmp_path / "in" / "go.sh").write_text("#!/bin/sh\necho from go\n")
    (tmp_path / "in" / "go.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("in/a.txt")
    fixture = Fixture.load(tmp_path, LIMITS)
    found = run(sandbox, "./in/go.sh; cat link; echo two > 'b c'; chmod +x 'b c'; rm in/a.txt; echo oops >&2; exit 3", fixture)
    assert (found.ended, found.exit_status, found.stdout, found.stderr) == ("exit", 3, b"from go\none\n", b"oops\n")
    # sha256 of "two\n" and of the script, computed apart.
    assert found.files["b c"] == "program 27dd8ed44a83ff94d557f9fd0412ed5a8cbca69ea04922d88c01184a07300a5a"
    assert set(found.files) == {"in", "in/go.sh", "link", "b c"}
    assert (found.files["link"], found.files["in"]) == ("link in/a.txt", "directory")
    assert (tmp_path / "in" / "a.txt").read_text() == "one\n"
    assert run(sandbox, "cat link", fixture).stdout == b"one\n", "every run starts from the fixture"


def test_a_command_ended_by_a_signal_has_the_shells_status(sandbox: Sandbox) -> None:
    assert run(sandbox, "kill -TERM $$").exit_status == 128 + 15


def test_a_fork_bomb_stays_small_and_is_gone_at_the_end(sandbox: Sandbox) -> None:
    """The count is taken inside, while the bomb runs: no more processes than the limit (and init)."""
    marker = f"bomb-{uuid.uuid4().hex}"
    bomb = f"bomb() {{ bash -c 'sleep 600 # {marker}' & bomb | bomb & }}; bomb; sleep 0.5; set -- /proc/[0-9]*; echo $# > count; cat count"
    found = run(sandbox, bomb)
    assert found.stdout == b"" or int(found.stdout) <= LIMITS.processes + 3
    assert b"Resource temporarily unavailable" in found.stderr
    assert running(marker) == []


def test_a_memory_bomb_fails_to_allocate(sandbox: Sandbox) -> None:
    found = run(sandbox, "x=aaaaaaaaaaaaaaaa; while true; do x=$x$x$x$x; done")
    assert (found.ended, found.exit_status != 0) == ("exit", True)
    assert b"cannot allocate" in found.stderr or found.exit_status >= 128


def test_an_infinite_loop_runs_out_of_cpu_time(sandbox: Sandbox) -> None:
    found = run(sandbox, "while :; do :; done")
    assert (found.ended, found.exit_status) == ("exit", 128 + 9)


@pytest.mark.parametrize("script", ["sleep 600", "exec >&- 2>&-; sleep 600", "trap '' TERM INT HUP; while :; do sleep 1; done"])
def test_waiting_for_ever_ends_at_the_deadline(script: str) -> None:
    try:
        quick = Sandbox(LIMITS.model_copy(update={"deadline_s": 1.0}))
    except UserError as error:
        pytest.skip(str(error))
    assert run(quick, script).ended == "deadline"


def test_huge_output_is_cut_and_ends_the_command(sandbox: Sandbox) -> None:
    found = run(sandbox, "yes")
    assert (found.ended, len(found.stdout)) == ("output", 16 * 1024)
    found = run(sandbox, "yes >&2")
    assert (found.ended, len(found.stderr)) == ("output", 16 * 1024)


def test_a_process_left_behind_is_killed_however_it_detaches(sandbox: Sandbox) -> None:
    marker = f"left-{uuid.uuid4().hex}"
    found = run(sandbox, f"setsid bash -c 'trap \"\" HUP TERM; sleep 600 # {marker}' >/dev/null 2>&1 </dev/null & disown -a; sleep 0.2; echo started")
    assert (found.ended, found.stdout) == ("exit", b"started\n")
    assert running(marker) == []


def test_nothing_outside_can_be_written_or_read(sandbox: Sandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    before = Path("/usr").stat().st_mtime_ns
    script = f"""
        for path in /x /etc/x /usr/x /usr/bin/x /bin/x /dev/x /proc/sys/kernel/hostname ../x; do echo no > $path; done
        rm -rf /usr/bin/env /bin/ls
        cat {secret} /etc/shadow /etc/hostname /proc/1/environ /old/etc/passwd
        ls /home /root /var /mnt /old{tmp_path}
        ln -s {secret} link; ln {secret} hard; cat link; echo no > link
        echo over > /tmp/allowed && cat /tmp/allowed
    """
    found = run(sandbox, script)
    assert found.stdout == b"over\n"
    assert found.files == {"link": f"link {secret}"}
    assert secret.read_text() == "the secret"
    assert Path("/usr").stat().st_mtime_ns == before
    assert not Path("/x").exists()


def test_there_is_no_network(sandbox: Sandbox) -> None:
    """A server of this machine listens on loopback and on an abstract Unix socket; neither hears anything."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)

        def accept() -> None:
            with contextlib.suppress(OSError):
                heard.append(server.accept())

        thread = threading.Thread(target=accept)
        thread.start()
        port = server.getsockname()[1]
        found = run(sandbox, f"echo hi > /dev/tcp/127.0.0.1/{port}; echo hi > /dev/tcp/1.1.1.1/53; cat /proc/net/dev | tail -n +3 | cut -d: -f1; :")
        assert b"Network is unreachable" in found.stderr or b"Connection refused" in found.stderr
        assert found.stdout.split() == [b"lo"]
        server.close()
        thread.join()
    assert heard == []


def test_there_are_no_privileges_to_be_had(sandbox: Sandbox) -> None:
    script = """
        id -u; grep -E '^(CapInh|CapPrm|CapEff|CapAmb|NoNewPrivs)' /proc/self/status | tr -d '[:space:]'; echo
        mount -t tmpfs x /tmp && echo mounted
        unshare -U true && echo namespace
        unshare -n true && echo network
        chroot / true && echo chroot
        kill -9 1; echo alive
    """
    found = run(sandbox, script)
    zeros = "0" * 16
    assert found.stdout.decode().split() == ["1000", f"CapInh:{zeros}CapPrm:{zeros}CapEff:{zeros}CapAmb:{zeros}NoNewPrivs:1", "alive"]


def test_the_environment_is_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "abc")
    found = run(sandbox, "env | cut -d= -f1 | sort | tr '\\n' ' '; ls /proc/self/fd | tr '\\n' ' '")
    assert found.stdout.decode() == "HOME LANG PATH PWD SHLVL TMPDIR TZ _ 0 1 2 3 "


@pytest.mark.parametrize(
    "script",
    [
        "for i in $(seq 100); do head -c 900000 /dev/zero > f$i || break; done",
        "for i in $(seq 1000); do : > f$i || break; done",
        "head -c 5000000 /dev/zero > big",
        "gzip -dc bomb.gz > unpacked",
        "for i in $(seq 100); do head -c 900000 /dev/zero > /tmp/f$i || break; done; exit 1",
    ],
)
def test_files_are_bounded_in_number_size_and_sum(sandbox: Sandbox, script: str, tmp_path: Path) -> None:
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"0" * 100_000_000))
    found = run(sandbox, f"trap '' XFSZ; {script}; du -sk . | cut -f1", Fixture.load(tmp_path, LIMITS))
    assert found.ended == "exit"
    assert found.stderr
    assert len(found.files) <= LIMITS.max_files
    assert not found.stdout or int(found.stdout) <= 4 * 1024 + 64


def test_a_regex_bomb_runs_out_of_cpu_time(sandbox: Sandbox) -> None:
    found = run(sandbox, "printf 'a%.0s' $(seq 40) > line; echo b >> line; grep -P -c '^(a|a|aa)+$' line; exec awk 'BEGIN { while (1) x++ }'")
    assert (found.ended, found.exit_status) == ("exit", 128 + 9)


def test_what_is_hard_to_describe_is_described(sandbox: Sandbox) -> None:
    script = """
        echo hi > 'a
b'; printf x > $'\\xff'; echo hi > closed; chmod 000 closed; mkdir shut; echo hi > shut/in; chmod 000 shut
        truncate -s 1M hole; mkfifo pipe; ln -s /etc/passwd out; ln -s loop loop
        name=$(printf 'n%.0s' $(seq 54)); for i in $(seq 100); do mkdir $name; cd $name; done
    """
    found = run(sandbox, script)
    hello = "file 98ea6e4f216f2fb4b69fff9b3a44842c38686ca685f3f55dc48c5d3fb1107be4"
    assert found.files["a\nb"] == found.files["closed"] == found.files["shut/in"] == hello
    assert found.files["\xff"].startswith("file ")
    assert (found.files["hole"], found.files["pipe"], found.files["loop"]) == ("sparse 1048576", "other", "link loop")
    assert found.files["out"] == "link /etc/passwd"
    assert sum("nnn" in name for name in found.files) > 50


def test_arguments_that_no_process_can_take() -> None:
    assert is_runnable("ls")
    assert not is_runnable("ls\0")
    assert not is_runnable("\ud800")
    assert not is_runnable("x" * 131_072)
    assert is_runnable("x" * 131_071)


def test_the_longest_argument_runs(sandbox: Sandbox) -> None:
    assert run(sandbox, ": " + "x" * (131_071 - 2)).exit_status == 0


def test_a_fixture_must_fit_and_hold_files_only(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        Fixture.load(tmp_path / "missing", LIMITS)
    (tmp_path / "big").write_bytes(b"0" * 3_000_000)
    with pytest.raises(UserError, match="smaller directory"):
        Fixture.load(tmp_path, LIMITS)
    (tmp_path / "big").unlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither file, directory nor link"):
        Fixture.load(tmp_path, LIMITS)


def test_a_machine_without_namespaces_gets_no_sandbox_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program with an `unshare` that the kernel denies: nothing is run, and the user is told."""
    source = runner._INSIDE.read_text()
    denied = source.replace("os.unshare(_NAMESPACES)", "raise PermissionError(1, 'Operation not permitted')")
    assert denied != source
    (tmp_path / "inside.py").write_text(denied)
    monkeypatch.setattr(runner, "_INSIDE", tmp_path / "inside.py")
    with pytest.raises(UserError, match=r"Operation not permitted.*it runs nothing without"):
        Sandbox(LIMITS)


@pytest.mark.parametrize("fault", ["sys.exit(3)", "os.kill(os.getpid(), 9)"])
def test_a_sandbox_that_dies_is_an_infrastructure_failure(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    source = runner._INSIDE.read_text()
    (tmp_path / "inside.py").write_text(source.replace("    job = json.load(sys.stdin.buffer)\n", f"    {fault}\n"))
    monkeypatch.setattr(runner, "_INSIDE", tmp_path / "inside.py")
    with pytest.raises(SandboxRefused, match="ended with"):
        run(sandbox, "echo hi")
