"""The slow-link benchmark: its hosts and links, its order of runs, its numbers, and one short run of it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import links  # noqa: E402 - after the path to it
import slow_link  # noqa: E402

pytestmark = pytest.mark.timeout(600)

TINY = """
import sys
from mpi4py import MPI
import numpy as np
import socket
comm = MPI.COMM_WORLD
block = np.zeros(1_000_000, "u1")
if comm.rank == 0:
    comm.Send(block, 1)
elif comm.rank == 1:
    comm.Recv(block, 0)
print(socket.gethostname(), comm.size, comm.Split_type(MPI.COMM_TYPE_SHARED).size)
"""


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    try:
        with links.Links(2, "200mbit") as made:
            yield made
    except links.Unavailable as reason:
        pytest.skip(f"no hosts here: {reason}")


def test_each_rank_has_a_host_and_what_it_sends_crosses_its_link(hosts, tmp_path):
    script = tmp_path / "tiny.py"
    script.write_text(TINY)
    before = hosts.bytes()
    done = hosts.run([str(script)], os.environ, timeout=300)
    assert done.returncode == 0, done.stdout
    assert sorted(line for line in done.stdout.splitlines() if line) == [f"{host} 2 1" for host in hosts.hosts]
    first, second = (hosts.bytes()[host] for host in hosts.hosts)
    assert 1_000_000 < first.sent - before[hosts.hosts[0]].sent < 1_200_000
    assert 1_000_000 < second.received - before[hosts.hosts[1]].received < 1_200_000
    assert second.sent - before[hosts.hosts[1]].sent < 200_000


def test_both_ends_of_a_link_have_its_rate(hosts):
    for number, host in enumerate(hosts.hosts):
        for namespace, card in ((host, links.CARD), (hosts._switch, f"port{number}")):
            shown = subprocess.run(
                ["tc", "-n", namespace, "qdisc", "show", "dev", card], capture_output=True, text=True
            )
            assert "tbf" in shown.stdout and "rate 200Mbit" in shown.stdout


def test_commands_reach_a_host_unharmed_and_their_exit_code_comes_back(hosts):
    code = "import os, sys; print(os.uname().nodename, os.getcwd(), sys.argv[1:]); sys.exit(3)"
    done = links.run(hosts.on(hosts.hosts[1], [sys.executable, "-c", code, "a b", "$HOME", "'"]), os.environ, 60)
    assert done.stdout.strip() == f"{hosts.hosts[1]} {os.getcwd()} {['a b', '$HOME', chr(39)]}"
    assert done.returncode == 3


def test_hosts_are_gone_afterwards_also_after_an_error():
    with pytest.raises((KeyboardInterrupt, links.Unavailable)) as caught, links.Links(1, "1gbit") as made:
        assert (links.NAMESPACES / made.hosts[0]).exists()
        raise KeyboardInterrupt
    if caught.type is links.Unavailable:
        pytest.skip(f"no hosts here: {caught.value}")
    assert not [path.name for path in links.NAMESPACES.glob(f"{links.PREFIX}{os.getpid()}*")]
    assert not made._folder.exists()


STAYS = """
import signal, links
with links.Links(1) as made:
    print(made.hosts[0], flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(("way", "code"), [("terminate", 143), ("kill", -9)])
def test_hosts_are_gone_after_sigterm_and_those_of_the_dead_before_the_next(hosts, way, code):
    path = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", STAYS], stdout=subprocess.PIPE, text=True, env=path) as process:
        host = process.stdout.readline().strip()
        assert (links.NAMESPACES / host).exists()
        getattr(process, way)()
    assert process.returncode == code
    assert (links.NAMESPACES / host).exists() == (way == "kill")
    links.remove_orphans()
    assert not (links.NAMESPACES / host).exists()
    assert not (links.FOLDERS / f"{links.PREFIX}{process.pid}").exists()
    assert (links.NAMESPACES / hosts.hosts[0]).exists()  # not those of the living


WAITS = """
import os, links, sys
with links.Links(1) as made:
    made.run([sys.argv[1]], os.environ, 600)
"""


def test_sigterm_ends_the_ranks_too(hosts, tmp_path):
    script, sign = tmp_path / "wait.py", tmp_path / "sign"
    os.mkfifo(sign)
    script.write_text(
        f"import os, signal\nwith open({str(sign)!r}, 'w') as f: f.write(str(os.getpid()))\nsignal.pause()"
    )
    path = {**os.environ, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen([sys.executable, "-c", WAITS, str(script)], env=path) as process:
        rank = int(sign.read_text())  # waits for it
        process.terminate()
    assert process.returncode == 143
    deadline = time.monotonic() + 60  # its parent has been killed, too, and another process must take note of its end
    while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{rank}").exists()


@pytest.mark.parametrize(
    ("lacking", "message"),
    [
        ("root", "need root"),
        ("tc", "no `tc` here: install iproute2"),
        ("linux", "namespaces of Linux, and this is darwin"),
    ],
)
def test_what_is_lacking_is_said(monkeypatch, capsys, tmp_path, lacking, message):
    monkeypatch.setattr(links.os, "geteuid", lambda: 1000 if lacking == "root" else 0)
    monkeypatch.setattr(links.shutil, "which", lambda name: None if name == lacking else f"/bin/{name}")
    monkeypatch.setattr(links.sys, "platform", "darwin" if lacking == "linux" else "linux")
    assert slow_link.main(["--rows", "lenet 32", "--results", str(tmp_path / "r.json")]) == 0
    assert "not run: " in (said := capsys.readouterr().out) and message in said


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="hosts=0"):
        links.Links(0)
    with pytest.raises(ValueError, match="rate='100'"):
        links.Links(1, "100")
    with pytest.raises(SystemExit):
        slow_link.parse(["--seeds", "0"])


def test_runs_are_interleaved_and_each_is_done_once():
    rows = [row for row in slow_link.ROWS if row.training is slow_link.LENET and not row.fast]
    steps = slow_link.plan(rows, 3)
    assert len(steps) == len({slow_link.key(*step) for step in steps}) == 3 * len(rows)
    assert [seed for _, seed in steps] == [1] * len(rows) + [2] * len(rows) + [3] * len(rows)
    assert len({steps[i * len(rows)][0].name for i in range(3)}) == 3  # each seed begins with another row
    usual = slow_link.plan(slow_link.ROWS, None)
    assert max(seed for row, seed in usual if row.training is slow_link.WIDE) == slow_link.WIDE.seeds


@pytest.mark.parametrize("quick", [False, True])
def test_every_row_has_epochs_left_after_its_warm_up(quick):
    for row in slow_link.ROWS:
        assert row.job(quick)["warm_up"] < row.job(quick)["epochs"], row.name


def test_a_row_with_overlap_differs_in_nothing_else():
    plain, with_overlap = (
        next(r for r in slow_link.ROWS if r.name == f"wide plateau{end}") for end in ("", " overlap")
    )
    assert with_overlap.base == plain.base == "wide 32"
    assert with_overlap.job(False) == plain.job(False) | {"options": {"overlap": True}}


@pytest.mark.parametrize("change", [{"epochs": 1}, {"clipnorm": 5.0}, {"options": {"overlap": True}}, {"unknown": 1}])
def test_results_of_other_settings_are_not_gone_on_from(tmp_path, change):
    path, (row,) = tmp_path / "r.json", [row for row in slow_link.ROWS if row.name == "lenet 4"]
    path.write_text(json.dumps({"lenet 4/1": {"job": row.job(False) | change}}))
    with pytest.raises(SystemExit, match=f"lenet 4/1 was measured with {next(iter(change))}=.*--results"):
        slow_link.main(["--rows", "lenet 4", "--seeds", "1", "--results", str(path)])


def test_results_of_the_same_settings_are_kept(tmp_path, capsys):
    path, (row,) = tmp_path / "r.json", [row for row in slow_link.ROWS if row.name == "lenet 32"]
    run = run_of((2, 10, 20, 0.97), (4, 20, 40, 0.99)) | {"job": row.job(False)}
    path.write_text(json.dumps({"lenet 32/1": run}))
    assert slow_link.main(["--rows", "lenet 32", "--seeds", "1", "--results", str(path)]) == 0
    assert "| lenet 32 | 1 |" in capsys.readouterr().out


def run_of(*notes, samples=100):
    names = ("seconds", "megabytes_up", "megabytes_down", "accuracy", "push_bits")
    history = [dict(zip(names, note)) for note in notes]
    return {"history": history, "samples": samples, "links": None}


def test_numbers_of_a_run():
    run = run_of((2, 10, 20, 0.97, 4), (4, 20, 40, 0.99, 8))
    assert slow_link.speed(run) == 50
    assert slow_link.megabytes(run) == 60
    assert slow_link.megabytes_to(run, 0.98) == pytest.approx(45)
    assert slow_link.megabytes_to(run, 0.995) == float("inf")
    assert slow_link.final(run) == pytest.approx(99)
    assert slow_link.widths(run) == "4: 1, 8: 1"
    # gaps of 0.1 and 0.3: mean 0.2, standard deviation 0.1414, standard error 0.1
    assert slow_link.loss([99.1, 99.3], [99.0, 99.0]) == "+0.20 ± 0.20"


def test_table_compares_with_32_bits_of_the_same_seeds(tmp_path):
    results = slow_link.Results(tmp_path / "r.json")
    for seed in (1, 2):
        results.add(f"lenet 32/{seed}", run_of((10, 50, 50, 0.98, 32), (20, 100, 100, 0.99, 32)))
    results.add("lenet 4/1", run_of((2, 10, 10, 0.98, 4), (4, 20, 20, 0.99, 4)))
    rows = [row for row in slow_link.ROWS if row.name in ("lenet 32", "lenet 4", "lenet 2")]
    head, _, exact, four = slow_link.table(rows, results)  # and none of 2 bits, which has not been run
    assert [line.count("|") for line in (exact, four)] == [head.count("|")] * 2
    assert four.split(" | ")[1:9] == [
        "1", "4", "50 (5.00x)", "20", "20", "1/5.0", "30 (1/5.0)", "3 (5.00x)"
    ]  # fmt: skip


@pytest.mark.mpi
def test_short_run(tmp_path, monkeypatch):
    """Both a row over memory and, where there can be hosts, one over links; what is there is not run again."""
    random = np.random.default_rng(1)
    shapes = {"x_train": (3000, 28, 28), "y_train": (3000,), "x_test": (500, 28, 28), "y_test": (500,)}
    arrays = {n: random.integers(0, 10 if n[0] == "y" else 256, s).astype("u1") for n, s in shapes.items()}
    np.savez(tmp_path / "mnist.npz", **arrays)
    given = ["--data", str(tmp_path / "mnist.npz"), "--results", str(tmp_path / "r.json"), "--quick", "--seeds", "1"]
    job = slow_link.Training.job
    monkeypatch.setattr(
        slow_link.Training, "job", lambda self, quick: job(self, quick) | {"samples": 2000, "epochs": 3}
    )
    assert slow_link.main([*given, "--rows", "lenet fast 8", "lenet plateau"]) == 0
    entries = json.loads((tmp_path / "r.json").read_text())
    if "lenet plateau/1" not in entries:
        pytest.skip("no hosts here; see the reason above")
    assert slow_link.main([*given, "--rows", "lenet fast 8", "lenet plateau"]) == 0
    assert json.loads((tmp_path / "r.json").read_text()) == entries
    fast, slow = entries["lenet fast 8/1"], entries["lenet plateau/1"]
    assert len(slow["history"]) == 3 and len(fast["history"]) == 2
    assert [h["push_bits"] for h in slow["history"]] == [4, 4, 4] and fast["links"] is None
    assert sum(w["samples"] for w in slow["workers"]) == 3 * 500  # an epoch is a quarter of a pass
    # What the epochs do not have are the parameters that each worker began with.
    assert slow["megabytes"] - slow_link.megabytes(slow) == pytest.approx(4 * 4 * 61_706 / 1e6, rel=0.05)
    crossed = sum(slow["links"][-1]) / 1e6
    assert 1 < crossed / (slow["megabytes"] + slow["warm_up_megabytes"]) < 1.6  # short runs have much beside it
