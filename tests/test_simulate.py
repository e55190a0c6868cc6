"""The simulator's timing mode: queues against closed forms, models against their bounds, inputs and their errors."""

import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hps_keras.batches.shares import SHARES, Resizing
from hps_keras.consistency import ASP, BSP, SSP, WASP, Auto, parse
from hps_keras.errors import ConfigurationError, HpsError
from hps_keras.server.telemetry import Summary
from hps_keras.simulate import Failure, Link, Report, Scenario, Server, Slowdown, Worker, simulate, traffic
from hps_keras.simulate import inputs as reading
from hps_keras.simulate.cli import main, make_parser
from hps_keras.simulate.engine import NoArithmetic
from hps_keras.simulate.report import table
from hps_keras.simulate.scenario import finish_time, speed_profile
from hps_keras.simulate.traffic import message_bytes

SPEEDS = (1, 1, 0.5, 0.25)
MODELS = (BSP(), ASP(), SSP(3), WASP(10), WASP(1))


def machines(speeds=SPEEDS, jitter=0.0, step=0.05, **more):
    return tuple(Worker(step / v, jitter=jitter, **more) for v in speeds)


def unequal(model=None, steps=400, jitter=0.0, **more):
    """Four workers of unequal speed on leased samples; `steps` batches in a pass."""
    return Scenario(machines(jitter=jitter), model or BSP(), samples=64 * steps, **more)


class Recorder(NoArithmetic):
    """Notes what the engine asks to be computed."""

    def __init__(self):
        self.lost = set()
        self.leases, self.passes, self.order, self.holds = [], [], [], {}
        self.version, self.ends = 0, []
        self.widths_given = []

    def widths(self, push, pull):
        self.widths_given.append((push, pull))

    def begin_pass(self, number):
        self.passes.append(number)
        self.leases.append([])

    def take(self, push, factor, first, lease):
        assert push.version == self.holds.get(push.worker, 0), "the gradient of parameters that the worker has not"
        assert lease is None or lease.samples == push.samples
        self.leases[-1].append(lease)
        self.order.append(push.worker)

    def update(self, decision):
        self.version = decision.version

    def answer(self, worker, exact):
        self.holds[worker] = self.version

    def leave(self, worker):
        self.lost.add(worker)

    def epoch_end(self, epoch, now):
        assert {version for worker, version in self.holds.items() if worker not in self.lost} == {self.version}
        self.ends.append((epoch, now))
        return {"val_accuracy": 0.5 + 0.1 * epoch}


# Times in closed form


def test_bsp_takes_the_slowest_workers_time():
    report = simulate(unequal(steps=400, epochs=3))
    assert report.epoch_seconds == pytest.approx([100 * 0.2] * 3, rel=1e-12)
    assert report.updates == 300 and report.samples == 3 * 400 * 64
    assert report.samples_per_second == pytest.approx(4 * 64 / 0.2)
    assert report.parts["rounds"] > 0.4 and report.parts["exchange"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("overlap", [False, True])
def test_queues_of_network_and_updates_in_closed_form(overlap):
    """Equal workers; each transfer takes T at the server, which sends one answer after another, so they spread by T."""
    n, rounds, step, latency, update = 4, 10, 0.05, 0.002, 0.003
    parameters, bandwidth = 250_000, 1e8
    transfer = 4 * parameters / bandwidth  # 0.01
    scenario = Scenario(
        machines((1,) * n, link=Link(bandwidth, latency)),
        server=Server(bandwidth=bandwidth, update_seconds=update, overlap=overlap),
        parameters=parameters,
        samples=64 * n * rounds,
    )
    first = step + latency + n * transfer + update
    later = n * transfer + latency + step + latency + transfer + update
    end = n * transfer + latency + latency + n * transfer + latency  # the last answer, the pause, and its answers
    assert simulate(scenario).seconds == pytest.approx(first + (rounds - 1) * later + end, rel=1e-12)


def test_taking_gradients_in_takes_time_too():
    """A push that comes last and late finds the others taken; all that come at once are taken in a row."""
    equal = Scenario(machines((1,) * 4), server=Server(push_seconds=0.01), samples=64 * 40)
    assert simulate(equal).seconds == pytest.approx(10 * (0.05 + 4 * 0.01))
    last = Scenario(machines((1, 1, 1, 0.1)), server=Server(push_seconds=0.01), samples=64 * 40)
    assert simulate(last).seconds == pytest.approx(10 * (0.5 + 0.01))


@pytest.mark.parametrize("overlap", [False, True])
def test_one_worker_pays_both_ways_over_its_link(overlap):
    link = Link(1e6, 0.01)
    scenario = Scenario(machines((1,), link=link), ASP(), Server(overlap=overlap), 25_000, 64 * 20)
    report = simulate(scenario)
    exchange = 2 * (0.1 + 0.01)
    assert report.seconds == pytest.approx(20 * (0.05 + exchange) + 0.1 + 2 * 0.01)
    assert report.bytes_up == 20 * 100_000 and report.bytes_down == 21 * 100_000
    narrow = Server(bandwidth=5e5, overlap=overlap)  # narrower than the link
    slow = Scenario(scenario.workers, ASP(), narrow, 25_000, 64 * 20)
    assert simulate(slow).seconds == pytest.approx(20 * (0.05 + 2 * (0.2 + 0.01)) + 0.2 + 2 * 0.01)


def test_a_short_batch_takes_less_time():
    worker = Worker(0.05, batch_size=64, fixed_seconds=0.01, jitter=0.0)
    report = simulate(Scenario((worker,), ASP(), samples=64 + 16))
    assert report.seconds == pytest.approx(0.05 + 0.01 + 0.04 * 16 / 64)


# The models


def test_asp_reaches_the_sum_of_the_speeds():
    report = simulate(unequal(ASP(), steps=2000, jitter=0.05))
    assert 0.98 < report.samples_per_second / report.total_speed < 1.01
    assert report.bound == pytest.approx(2.75 / (4 * 0.25))
    assert 2.5 < report.mean_staleness < 3.1  # N - 1
    assert report.parts["compute"] > 0.98


def test_fixed_shards_of_unequal_workers_wait_at_the_epochs_end():
    workers = machines(steps=100)
    report = simulate(Scenario(workers, ASP(), epochs=2))
    assert report.epoch_seconds == pytest.approx([100 * 0.2] * 2)
    assert report.parts["ends"] == pytest.approx((3 / 4 + 3 / 4 + 1 / 2) / 4, abs=0.01)
    assert any("ElasticDataset" in note for note in report.notes)


@pytest.mark.parametrize("bound", [0, 3])
def test_ssp_keeps_its_bound(bound):
    recorder = Recorder()
    report = simulate(unequal(SSP(bound), jitter=0.3, seed=3), recorder)
    clocks = Counter(dict.fromkeys(range(4), 0))
    furthest = 0
    for worker in recorder.order[: -4 * (bound + 2)]:  # at the end some have left the epoch
        clocks[worker] += 1
        furthest = max(furthest, max(clocks.values()) - min(clocks.values()))
    assert furthest == bound + 1
    assert report.parts["bounds"] > 0.3


@pytest.mark.parametrize("k", [1, 10, 50])
def test_wasp_syncs_every_k_steps(k):
    report = simulate(unequal(WASP(k), steps=1000, jitter=0.1))
    assert 1000 // (4 * k + 3) <= report.syncs <= 1000 // (4 * k)
    assert report.syncs and report.parts["syncs"] > 0
    assert report.mean_weight < 0.6
    assert {w["worker"]: w["lost"] for w in report.workers} == dict.fromkeys(range(4), False)


def test_forced_syncs_cost_what_the_notes_of_the_algorithm_say():
    """63 % of ASP at k = 1, 96 % at k = 10, 97.5 % at k = 50, at speeds 1, 1, 0.5, 0.25 and 5 % jitter."""
    asp = simulate(unequal(ASP(), steps=4000, jitter=0.05)).samples_per_second
    for k, share in ((1, 0.63), (10, 0.955), (50, 0.98)):
        found = simulate(unequal(WASP(k), steps=4000, jitter=0.05)).samples_per_second / asp
        assert found == pytest.approx(share, abs=0.02), k


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_every_sample_once_a_pass_and_versions_agree(model):
    recorder = Recorder()
    scenario = unequal(model, steps=50, jitter=0.2, epochs=3)
    report = simulate(Scenario(scenario.workers, model, samples=64 * 50 + 17, epochs=3, seed=5), recorder)
    assert recorder.passes == [1, 2, 3]
    for leases in recorder.leases:
        used = sorted(p for lease in leases for p in range(lease.start, lease.start + lease.samples))
        assert used == list(range(64 * 50 + 17))
    assert [e for e, _ in recorder.ends] == [0, 1, 2]
    assert report.time_to("val_accuracy", 0.6) == recorder.ends[1][1] and report.time_to("val_accuracy", 0.9) is None


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_workers_time_adds_up(model):
    report = simulate(unequal(model, steps=100, jitter=0.2, epochs=2))
    for row in report.workers:
        parts = row["compute_seconds"] + row["exchange_seconds"] + sum(row["waiting_seconds"].values())
        assert parts == pytest.approx(report.seconds)
    assert sum(report.parts.values()) == pytest.approx(1)


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_seed_repeats_and_another_differs(model):
    link = Link(1e8, 1e-4)
    scenario = Scenario(machines(jitter=0.3, link=link), model, Server(2, 1e8), 100_000, 64 * 60, 2, seed=1)
    again = simulate(scenario).to_json()
    assert simulate(scenario).to_json() == again
    other = Scenario(machines(jitter=0.3, link=link), model, Server(2, 1e8), 100_000, 64 * 60, 2, seed=2)
    assert simulate(other).seconds != again["seconds"]


def test_models_are_compared_on_the_same_jitter():
    """A worker's n-th step takes as long in one model as in the other."""
    fixed = machines(jitter=0.4, steps=30)
    a, b = (simulate(Scenario(fixed, model)) for model in (BSP(), ASP()))
    for one, other in zip(a.workers, b.workers):
        assert one["compute_seconds"] == pytest.approx(other["compute_seconds"], rel=1e-12)


# The servers as a bottleneck


def test_updates_saturate_the_server_and_more_servers_help():
    def run(servers):
        workers = machines((1,) * 16)
        return simulate(Scenario(workers, ASP(), Server(servers, update_seconds=0.02), samples=64 * 1600))

    one, four, many = run(1), run(4), run(64)
    assert one.samples_per_second == pytest.approx(64 / 0.02, rel=0.02) and one.utilisation["updating"] > 0.97
    assert four.samples_per_second == pytest.approx(4 * one.samples_per_second, rel=0.03)
    assert many.samples_per_second == pytest.approx(16 * 64 / 0.05, rel=0.03)
    assert "the servers are receiving and updating" in str(one) and "the servers are" not in str(many)


def test_bandwidth_bounds_the_pushes():
    scenario = Scenario(
        machines((1,) * 32, link=Link(1e9)), ASP(), Server(bandwidth=1e9), parameters=10_000_000, samples=64 * 640
    )
    report = simulate(scenario)
    assert report.samples_per_second == pytest.approx(64 * 1e9 / 40e6, rel=0.1)
    assert report.utilisation["sending"] > 0.95
    assert report.parts["exchange"] > 0.8


@pytest.mark.parametrize(("overlap", "seconds"), [(False, 0.01 + 0.006), (True, 0.01)])
def test_receiving_and_updating_add_up_unless_they_overlap(overlap, seconds):
    server = Server(bandwidth=1e8, update_seconds=0.006, overlap=overlap)
    report = simulate(Scenario(machines((1,) * 16), ASP(), server, 250_000, 64 * 1600))
    assert report.samples_per_second == pytest.approx(64 / seconds, rel=0.03)
    what, share = report.bottleneck
    assert what == "receiving and updating" or (overlap and what in ("receiving", "sending"))
    assert 0.97 < share < 1 + 1e-9 and f"the servers are {what}" in str(report)


def test_several_servers_are_kept_by_several_workers_at_once():
    """Links as wide as a server's interface: four servers serve four workers in the time of one."""

    def speed(servers, link):
        server = Server(servers, 1e8, update_seconds=0.006)
        workers = machines((1,) * 64, link=Link(link))
        return simulate(Scenario(workers, ASP(), server, 250_000, 64 * 3200)).samples_per_second

    assert speed(1, 1e8) == pytest.approx(64 / (0.01 + 0.006), rel=0.03)
    assert speed(4, 1e8) == pytest.approx(4 * 64 / (0.01 + 0.006), rel=0.03)
    assert speed(1, 2e7) == pytest.approx(64 / (0.05 + 0.006), rel=0.03)  # one server waits for each slow link


def test_a_slow_link_keeps_the_others_waiting_unless_they_overlap():
    """The server receives over the slow link, and updates anew when the answer has gone out over it: a second each."""

    def exchange(overlap):
        slow, fast = machines((1, 1), steps=1)
        workers = (dataclasses.replace(slow, link=Link(1e6)), dataclasses.replace(fast, link=Link(1e8)))
        report = simulate(Scenario(workers, ASP(), Server(bandwidth=1e8, overlap=overlap), 250_000))
        return report.workers[1]["exchange_seconds"]

    assert exchange(True) == pytest.approx(4 * 0.01, abs=0.015)  # up, down, and down with the other at the end
    assert exchange(False) == pytest.approx(1 + 1 + 0.03, abs=0.015)


# What goes wrong


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_lost_worker_costs_no_sample(model):
    recorder = Recorder()
    report = simulate(unequal(model, failures=(Failure(1, 2.03), Failure(3, 3.0)), epochs=2), recorder)
    assert [w["lost"] for w in report.workers] == [False, True, False, True]
    assert report.samples == 2 * 64 * 400 and recorder.lost == {1, 3}
    for leases in recorder.leases:
        used = sorted(p for lease in leases for p in range(lease.start, lease.start + lease.samples))
        assert used == list(range(64 * 400))
    assert report.workers[1]["samples"] < report.workers[0]["samples"] / 3


def test_bsp_waits_until_a_loss_is_noticed():
    def seconds(noticed):
        report = simulate(Scenario(machines((1, 1), steps=100), failures=(Failure(1, 1.01, noticed),)))
        assert report.workers[1]["compute_seconds"] == pytest.approx(1.01)
        return report.seconds

    assert seconds(0) == pytest.approx(5.0)
    assert seconds(10) == pytest.approx(5.0 + 10 - 0.04)  # the round would have ended 0.04 s after the loss


def test_losing_everybody_is_said():
    with pytest.raises(ConfigurationError, match=r"fail: all workers are lost by second 4\.5, in epoch 1 of 1"):
        simulate(unequal(ASP(), failures=tuple(Failure(w, 3.0 + w / 2) for w in range(4))))


def test_a_loss_after_the_end_changes_nothing():
    assert simulate(unequal(failures=(Failure(0, 1e6),))).seconds == simulate(unequal()).seconds


def test_a_slow_down_in_closed_form():
    workers = machines((1,), steps=100)  # 5 s at full speed
    report = simulate(Scenario(workers, ASP(), slowdowns=(Slowdown(0, 1.0, 3.0, 0.5), Slowdown(0, 2.0, 3.0, 0.5))))
    assert report.seconds == pytest.approx(5 + 0.5 + 0.75)  # half speed for 1 s, a quarter for 1 s
    forever = simulate(Scenario(workers, ASP(), slowdowns=(Slowdown(0, 4.0, math.inf, 0.1),)))
    assert forever.seconds == pytest.approx(4 + 10)


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0.1, 50), st.floats(0.05, 4)), max_size=5),
    st.floats(0, 80),
    st.floats(0, 30),
    st.floats(0, 30),
)
def test_work_is_neither_lost_nor_won_at_changes_of_speed(slow, start, first, second):
    profile = speed_profile([Slowdown(0, a, a + length, factor) for a, length, factor in slow], 0)
    middle = finish_time(start, first, profile)
    assert middle >= start
    assert finish_time(middle, second, profile) == pytest.approx(finish_time(start, first + second, profile))


# Fewer bits


def narrow(push_bits, pull_bits, model=None, seconds=1e-6, **more):
    """Two workers on slow links, no time for anything else."""
    server = Server(2, 1e9, coding_rate=math.inf)
    workers = tuple(Worker(seconds, jitter=0, link=Link(1e6), coding_rate=math.inf) for _ in range(2))
    bits = {"push_bits": push_bits, "pull_bits": pull_bits}
    return Scenario(workers, model or ASP(), server, parameters=2**20, samples=64 * 40, **bits, **more)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16])
def test_a_link_is_faster_by_what_the_widths_save(bits):
    full, coded = simulate(narrow(32, 32)), simulate(narrow(bits, bits))
    ratio = 32 / (bits + 32 / 512)  # a float32 scale for 512 elements
    assert coded.bytes_up == 40 * message_bytes(2**20, bits) == full.bytes_up / ratio
    end = 2 * 2**22  # at the epoch's end all get float32
    assert coded.bytes_down - end == (full.bytes_down - end) / ratio
    down = end / 2 / 1e6
    assert (coded.seconds - down) * ratio == pytest.approx(full.seconds - down, rel=1e-3)
    assert coded.bits == ((bits, bits),) and coded.widths == f"{bits} bits"


def test_each_direction_has_its_width():
    report = simulate(narrow(8, 16))
    assert report.bytes_up == 40 * message_bytes(2**20, 8)
    assert report.bytes_down == 40 * message_bytes(2**20, 16) + 2 * 2**22


def test_forced_syncs_are_in_full_precision():
    report = simulate(narrow(32, 4, WASP(5)))
    exact = 2 * (report.syncs + 1)
    assert report.syncs >= 3
    assert report.bytes_down == exact * 2**22 + (40 - 2 * report.syncs) * message_bytes(2**20, 4)


def test_coding_takes_time_in_closed_form():
    server, coders = Server(1, 1e9, coding_rate=2e9), {"coding_rate": 1e9}
    workers = (Worker(0.05, jitter=0, link=Link(1e9), **coders),)
    plain, coded = (
        simulate(Scenario(workers, BSP(), server, 10**7, 64 * 10, push_bits=bits, pull_bits=bits)) for bits in (32, 8)
    )
    travel = message_bytes(10**7, 8) / 1e9
    # The worker encodes 40 MB at 1 GB/s and decodes at 3, the server encodes at 2 GB/s and decodes at 6.
    step = 0.05 + 2 * travel + 0.04 * (1 + 1 / 3) + 0.02 * (1 + 1 / 3)
    assert coded.seconds == pytest.approx(10 * step + 0.04)
    assert plain.seconds == pytest.approx(10 * (0.05 + 0.08) + 0.04), "at 32 bits there is nothing to code"


def test_bsp_encodes_an_answer_once_for_all():
    def busy(model):
        workers = machines((1, 1, 1, 1), coding_rate=math.inf)
        scenario = Scenario(workers, model, Server(coding_rate=4e9), 10**9, samples=64 * 40, pull_bits=8)
        return simulate(scenario).busy_seconds["updating"]

    assert busy(BSP()) == pytest.approx(10) and busy(ASP()) == pytest.approx(40)  # of 4 GB


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_bytes_are_pushes_times_messages(model):
    scenario = Scenario(machines(), model, parameters=10**5, samples=64 * 100, epochs=2, push_bits=4, pull_bits=8)
    report = simulate(scenario)
    assert report.bytes_up == sum(w["steps"] for w in report.workers) * message_bytes(10**5, 4)
    small, exact = message_bytes(10**5, 8), 4 * 10**5
    ends = 2 * 4 * exact
    assert (report.bytes_down - ends) % small == report.syncs * 4 * exact % small


def test_the_estimate_has_the_kernels_buckets():
    from hps_keras.layout import ParameterLayout
    from hps_keras.quantization.codecs import Codec
    from hps_keras.quantization.kernels import BUCKET

    layout = ParameterLayout.of([("kernel", (777, 13), "float32")])
    assert BUCKET == traffic.BUCKET
    for bits in (1, 2, 4, 8, 16, 32):
        assert message_bytes(777 * 13, bits) == Codec(layout, bits).nbytes


def test_a_policy_needs_something_to_follow():
    with pytest.raises(ConfigurationError, match=r"policy='plateau'.*numeric"):
        simulate(Scenario(machines(), samples=640, policy="plateau"))


def test_a_policy_follows_what_is_monitored():
    scenario = Scenario(machines(), samples=640, parameters=4096, epochs=4, policy="plateau:4:8:0.2:1:0")
    recorder = Recorder()
    report = simulate(scenario, recorder)
    assert report.bits == ((4, 4), (4, 4), (8, 8), (8, 8)) and recorder.widths_given == list(report.bits)
    assert report.widths == "plateau:4:8:0.2:1:0"
    assert [note for note in report.notes if "bits" in note] == [
        "after epoch 2, val_accuracy 0.6: 8 bits for gradients, 8 for parameters"
    ]
    rising = dataclasses.replace(scenario, policy=lambda values: (8, 4)[len(values) > 1], pull_policy=2)
    assert simulate(rising, Recorder()).bits == ((8, 2), (8, 2), (4, 2), (4, 2))


def test_widths_and_policies_are_compared():
    more = {"workers": "2", "step_seconds": "1", "samples": "640", "coding_rate": "1GB,2GB"}
    made = reading.scenarios(flags(push_bits="32,8", pull_bits="16", policy=["plateau", "4"], **more))
    assert [s.widths for s in made] == ["32/16 bits", "8/16 bits", "plateau", "fixed:4"]
    assert [w.coding_rate for w in made[0].workers] == [1e9, 2e9]
    (only,) = reading.scenarios(flags(policy="descending", pull_policy="16", monitor="loss", **more))
    assert (only.policy, only.pull_policy, only.monitor) == ("descending", "fixed:16", "loss")
    text = table([simulate(s) for s in made[:2]])
    assert "bsp 32/16 bits" in text and "bsp 8/16 bits" in text


def test_a_recorded_runs_widths_are_taken(tmp_path, capsys):
    run = dataclasses.replace(RUN, coding={"push_bits": [4, 8], "pull_bits": [16]})
    run.save(tmp_path / "run.json")
    recorded = reading.from_run(str(tmp_path / "run.json"))
    (made,) = reading.scenarios(reading.merge(recorded, {}, {}))
    assert (made.push_bits, made.pull_bits) == (8, 16)
    (other,) = reading.scenarios(reading.merge(recorded, {}, flags(policy="plateau")))
    assert (other.widths, other.push_bits) == ("plateau", 32)
    assert main(["--from", str(tmp_path / "run.json"), "--push-bits", "2"]) == 0
    assert "not times" in capsys.readouterr().err


# Whatever comes together


@st.composite
def scenarios(draw):
    n = draw(st.integers(1, 6))
    link = Link(draw(st.sampled_from([math.inf, 1e6, 1e5])), draw(st.sampled_from([0.0, 0.01, 1.0])))
    resizing = draw(st.none() | st.builds(Resizing, st.just("accumulate"), st.sampled_from(SHARES)))
    workers = tuple(
        Worker(
            draw(st.floats(0.01, 2)),
            draw(st.integers(1, 20)),
            0.0,
            draw(st.floats(0, 1)),
            link,
            limit=draw(st.integers(0, 9)) if resizing else 0,
        )
        for _ in range(n)
    )
    lost = draw(st.lists(st.integers(0, n - 1), max_size=n - 1, unique=True))
    failures = tuple(Failure(w, draw(st.floats(0, 60)), draw(st.sampled_from([0.0, 5.0]))) for w in lost)
    model = draw(
        st.one_of(
            st.sampled_from([BSP(), ASP(), Auto(), Auto(WASP(2))]),
            st.integers(0, 3).map(SSP),
            st.sampled_from([1, 2, 5, None]).map(WASP),
        )
    )
    costs = draw(st.floats(0, 0.1)), draw(st.floats(0, 0.1))
    server = Server(draw(st.integers(1, 3)), link.bandwidth, *costs, draw(st.booleans()))
    slow = tuple(Slowdown(draw(st.integers(0, n - 1)), 3.0, 9.0, f) for f in draw(st.lists(st.floats(0.01, 5))))
    samples, epochs, seed = draw(st.integers(n, 400)), draw(st.integers(1, 3)), draw(st.integers(0, 99))
    bits = draw(st.sampled_from([32, 8, 1])), draw(st.sampled_from([32, 16, 2]))
    return Scenario(workers, model, server, 1000, samples, epochs, slow, failures, seed, resizing, *bits)


@pytest.mark.timeout(300)
@given(scenarios())
def test_every_scenario_ends_and_its_books_balance(scenario):
    recorder = Recorder()
    report = simulate(scenario, recorder)
    lost, everything = {f.worker for f in scenario.failures}, list(range(scenario.samples))
    assert recorder.lost <= lost and len(report.epoch_seconds) == scenario.epochs
    unused = 0
    for leases in recorder.leases:
        used = sorted(p for lease in leases for p in range(lease.start, lease.start + lease.samples))
        assert set(used) <= set(everything) and len(used) == len(set(used))
        unused += len(everything) - len(used)
    # What a worker takes with it is trained by the others, unless they have ended their epoch before it is missed.
    assert unused == 0 or recorder.lost
    assert any("unused" in note for note in report.notes) == bool(unused)
    for row in report.workers:
        parts = row["compute_seconds"], row["exchange_seconds"], *row["waiting_seconds"].values()
        assert all(part >= -1e-6 for part in parts) and sum(parts) <= report.seconds * (1 + 1e-9)
    assert all(0 <= share <= 1 + 1e-9 for share in report.utilisation.values())
    assert report.samples == sum(lease.samples for leases in recorder.leases for lease in leases)
    assert sum(report.staleness.values()) == sum(row["steps"] for row in report.workers)


# Many workers


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", [BSP(), ASP(), SSP(3), WASP(10)], ids=str)
def test_a_thousand_workers_and_eight_servers(model):
    workers = machines(SPEEDS * 256, jitter=0.1, step=0.3, link=Link(1.25e9, 5e-5))
    scenario = Scenario(workers, model, Server(8, 1.25e10, 0.0, 1e-3), 44_500_000, 1024 * 64 * 20)
    report = simulate(scenario)
    assert report.samples == 1024 * 64 * 20 and len(report.workers) == 1024
    assert report.updates == (20 if model.synchronous else 20 * 1024)


# Inputs


def flags(**settings):
    return {name: reading.Given(value, "--" + name.replace("_", "-")) for name, value in settings.items()}


def test_flags_make_a_scenario():
    made = reading.scenarios(
        flags(
            workers="4",
            speeds="1,1,0.5,0.25",
            step_seconds="50ms",
            jitter="0.1",
            batch_size="32",
            samples="60k",
            epochs="3",
            parameters="44.5M",
            bandwidth="1gbit",
            latency="50us",
            servers="2",
            server_bandwidth="10GB/s",
            push_seconds="2ms",
            update_seconds="0.5ns/byte",
            server_overlap="yes",
            slow=["0:10-20:0.5", "1:5-:0.1"],
            fail=["3@1min+10"],
            seed="7",
            consistency=["bsp", "wasp:50,weight=polynomial:0.5"],
        )
    )
    link = Link(125e6, 50 * 1e-6)
    workers = tuple(Worker(50 * 1e-3 / v, 32, 0.0, 0.1, link) for v in (1, 1, 0.5, 0.25))
    assert made[0] == Scenario(
        workers,
        BSP(),
        Server(2, 1e10, 2 * 1e-3, 0.5 * 1e-9 * 178_000_000, True),
        44_500_000,
        60_000,
        3,
        (Slowdown(0, 10, 20, 0.5), Slowdown(1, 5, math.inf, 0.1)),
        (Failure(3, 60, 10),),
        7,
    )
    assert made[1].consistency == parse("wasp:50,weight=polynomial:0.5")


def test_workers_and_servers_are_compared_and_values_go_round():
    made = reading.scenarios(flags(workers="4,8", servers="1,2", speeds="1,0.5", step_seconds="1", steps="10"))
    assert [(len(s.workers), s.server.count) for s in made] == [(4, 1), (4, 2), (8, 1), (8, 2)]
    assert [w.step_seconds for w in made[2].workers] == [1, 2] * 4
    assert len(reading.scenarios(flags(speeds="1,1,0.5", step_seconds="1", steps="10"))[0].workers) == 3


def test_yaml_and_flags_meet_and_flags_win(tmp_path):
    file = tmp_path / "s.yaml"
    file.write_text(
        "workers: 4\nspeeds: [1, 1, 0.5, 0.25]\nstep-seconds: 50ms\njitter: 0\nsamples: 25600\nlatency: 0\n"
        "slow: ['0:10-20:0.5']\nconsistency: [asp, 'ssp:3']\nparameters: 1e6\nbandwidth: 1gbit\n"
        "server-overlap: yes\n"
    )
    settings = reading.merge({}, reading.from_file(str(file)), flags(consistency=["bsp"], slow=["0:0-1:1"]))
    (made,) = reading.scenarios(settings)
    assert simulate(made).updates == 100 and made.server.overlap
    assert made.workers[0].link.bandwidth == 125e6 and made.server.bandwidth == 125e6 and made.parameters == 10**6


RUN = Summary(
    "asp",
    (600,),
    (
        {"steps": 400, "samples": 25_600, "batch_size": 64.0, "step_seconds": 0.05, "step_seconds_std": 0.0},
        {"steps": 200, "samples": 12_800, "batch_size": 64.0, "step_seconds": 0.1, "step_seconds_std": 0.0},
    ),
    {"push_seconds": 0.0, "parameters_bytes": 246_824, "pushes": 600},
)


def test_a_recorded_run_is_predicted(tmp_path):
    RUN.save(tmp_path / "run.json")
    run = reading.from_run(str(tmp_path / "run.json"))
    (made,) = reading.scenarios(reading.merge(run, {}, {}))
    assert (made.push_bits, made.pull_bits) == (32, 32) and made.server.coding_rate == math.inf
    assert str(made.consistency) == "asp" and made.parameters == 61_706
    assert simulate(made).seconds == pytest.approx(20, rel=0.01)
    more = reading.scenarios(reading.merge(run, {}, flags(workers="3", consistency=["bsp"], samples="38400")))[0]
    assert [w.step_seconds for w in more.workers] == [0.05, 0.1, 0.05]
    assert simulate(more).seconds == pytest.approx(200 * 0.1)


def resized(rank, fixed, per_sample, given, mean, jitter=0.0, exchange=0.0):
    """What a worker's row holds whose batches were of `mean` samples on average, far from what was `given`."""
    compute = fixed + per_sample * mean
    return {
        "worker": rank,
        "steps": 101,
        "samples": 101 * mean,
        "batch_size": float(mean),
        "compute_seconds": 100 * compute,
        "step_seconds": compute + exchange,
        "step_seconds_std": 0.5 * compute,  # from the changing sizes: no jitter
        "fitted_fixed_seconds": fixed,
        "fitted_sample_seconds": per_sample,
        "fitted_jitter": jitter,
        "given_batch_size": given,
    }


SERVED = {"push_seconds": 0.0, "parameters_bytes": 246_824, "pushes": 202}


def test_a_run_with_resized_batches_gives_the_fitted_times_of_the_given_sizes():
    rows = (
        resized(0, 0.01, 0.001, given=64, mean=96, exchange=0.004),
        resized(1, 0.02, 0.003, given=64, mean=32, jitter=0.1),
    )
    run = reading.from_summary(dataclasses.asdict(Summary("bsp", (101,), rows, SERVED, epochs=1)), "--from 'run.json'")
    (made,) = reading.scenarios(reading.merge(run, {}, {}))
    assert [w.batch_size for w in made.workers] == [64, 64]
    assert [w.step_seconds for w in made.workers] == pytest.approx([0.01 + 0.064 + 0.004, 0.02 + 0.192])
    assert [w.fixed_seconds for w in made.workers] == pytest.approx([0.014, 0.02])
    assert [w.jitter for w in made.workers] == pytest.approx([0.0, 0.1])
    assert [w.seconds(m) for w, m in zip(made.workers, (96, 32))] == pytest.approx([0.11, 0.116]), "as recorded"
    (other,) = reading.scenarios(reading.merge(run, {}, flags(step_seconds="5ms")))
    assert {w.fixed_seconds for w in other.workers} == {0.0}, "the fixed part of other times"


def test_a_process_alone_is_no_run_to_simulate_from(tmp_path):
    Summary.alone(epochs=1).save(tmp_path / "run.json")
    with pytest.raises(ConfigurationError, match=r"run.json' holds no worker that trained: one process alone .*hpsrun"):
        reading.from_run(str(tmp_path / "run.json"))


def test_rows_say_what_resizing_changes(capsys):
    modes = "--consistency bsp --consistency wasp:50 --consistency auto --resize no --resize cap --resize accumulate"
    common = "--workers 2 --speeds 1,0.5 --step-seconds 50ms --samples 6400"
    main(f"{common} {modes}".split())
    lines = capsys.readouterr().out.split("of the time")[0].splitlines()[3:]
    assert [re.split("  +", line)[0] for line in lines if line] == [
        *("bsp", "bsp + shares", "bsp + shares, accumulate"),
        *("wasp:50", "wasp:50 + limits", "wasp:50 + limits, accumulate"),
        *("auto", "auto, accumulate"),
    ]


GOOD = {"workers": "4", "step_seconds": "50ms", "samples": "1000"}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"workers": "four"}, ["--workers", "'four'", "60000"]),
        ({"workers": "0"}, ["--workers", "1 or more"]),
        ({"workers": "2.5"}, ["--workers", "'2.5'", "whole"]),
        ({"step_seconds": "0"}, ["--step-seconds", "0", "above 0"]),
        ({"step_seconds": "5 parsecs"}, ["--step-seconds", "'5 parsecs'", "50ms"]),
        ({"step_seconds": "1,2,3"}, ["--step-seconds", "3 values", "4 workers"]),
        ({"speeds": "1,0"}, ["--speeds", "0.0", "above 0"]),
        ({"jitter": "2"}, ["--jitter", "2.0", "0 to 1"]),
        ({"jitter": "nan"}, ["--jitter", "'nan'"]),
        ({"fixed_seconds": "1s"}, ["--fixed-seconds", "1.0", "0.05"]),
        ({"batch_size": "0"}, ["--batch-size", "1 or more"]),
        ({"samples": "3"}, ["--samples", "3", "4 workers"]),
        ({"samples": "inf"}, ["--samples", "'inf'", "whole"]),
        ({"steps": "10"}, ["--steps", "either samples"]),
        ({"epochs": "0"}, ["--epochs", "0", "1 or more"]),
        ({"parameters": "-1"}, ["--parameters", "-1"]),
        ({"bandwidth": "fast"}, ["--bandwidth", "'fast'", "1gbit"]),
        ({"bandwidth": "0"}, ["--bandwidth", "0.0", "above 0"]),
        ({"latency": "-1"}, ["--latency", "-1.0", "50us"]),
        ({"servers": "0"}, ["--servers", "0", "1 or more"]),
        ({"update_seconds": "1ms/parameter"}, ["--update-seconds", "0.8ns/byte"]),
        ({"update_seconds": "-1"}, ["--update-seconds", "-1.0"]),
        ({"consistency": ["tsp"]}, ["--consistency", "'tsp'", "wasp"]),
        ({"server_overlap": "maybe"}, ["--server-overlap", "'maybe'", "yes or no"]),
        ({"slow": ["0:10:0.5"]}, ["--slow", "0:10:0.5", "0:10-20:0.5"]),
        ({"slow": ["0:20-10:0.5"]}, ["--slow", "20-10", "after"]),
        ({"slow": ["9:1-2:0.5"]}, ["--slow", "9", "0 to 3"]),
        ({"slow": ["0:1-2:0"]}, ["--slow", "0.0", "above 0"]),
        ({"fail": ["3"]}, ["--fail", "'3'", "3@30"]),
        ({"fail": ["4@3"]}, ["--fail", "4", "0 to 3"]),
        ({"fail": ["1@3", "1@4"]}, ["--fail", "[1, 1]", "once"]),
        ({"seed": "-1"}, ["--seed", "-1"]),
        ({"push_bits": "8,3"}, ["--push-bits", "3", "1, 2, 4, 8, 16, 32"]),
        ({"pull_bits": "many"}, ["--pull-bits", "'many'"]),
        ({"policy": ["plato"]}, ["--policy", "'plato'", "plateau"]),
        ({"pull_policy": "plateau"}, ["--pull-policy", "'plateau'", "policy as well"]),
        ({"coding_rate": "0"}, ["--coding-rate", "0.0", "6GB"]),
        ({"server_coding_rate": "-1"}, ["--server-coding-rate", "-1.0", "6GB"]),
        ({"resize": ["bogus"]}, ["--resize", "'bogus'", "no, cap or accumulate"]),
        ({"epochs": ["1", "2"]}, ["--epochs", "one value"]),
        ({"epochs": {"a": 1}}, ["--epochs", "'a'", "N"]),
        ({"epochs": True}, ["--epochs", "True"]),
    ],
    ids=str,
)
def test_what_cannot_be_is_named_with_value_and_remedy(wrong, words):
    with pytest.raises(ConfigurationError) as error:
        reading.scenarios(flags(**{**GOOD, **wrong}))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["workers", "step_seconds", "samples"])
def test_what_is_missing_is_named(name):
    with pytest.raises(ConfigurationError, match=name):
        reading.scenarios(flags(**{n: v for n, v in GOOD.items() if n != name}))


@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        (["--file", "{file}"], "workers: 4\nspead: 1\n", ["'spead'", "s.yaml", "speeds"]),
        (["--file", "{file}"], "workers: [4\n", ["--file", "s.yaml", "cannot be read"]),
        (["--file", "{file}"], "just words", ["--file", "no settings", "workers: 4"]),
        (
            ["--file", "{file}"],
            "workers: 4\nstep_seconds: 1\nsteps: 9\njitter: 7\n",
            ["'jitter' in", "s.yaml", "7.0"],
        ),
        (["--file", "/nowhere.yaml"], "", ["--file", "/nowhere.yaml", "YAML"]),
        (["--from", "{file}"], "{", ["--from", "s.yaml", "ps.summary.save"]),
        (["--from", "{file}"], '{"workers": [{"steps": 1}]}', ["--from", "'consistency'", "ps.summary.save"]),
        (["--from", "{file}"], "[]", ["--from", "ps.summary.save"]),
        (["--from", "{run}", "--latency", "1ms"], "", ["--latency", "--from", "network"]),
        (["--target", "loss"], "", ["--target", "'loss'", "val_accuracy=0.985"]),
        (["--target", "loss=1"], "", ["--target", "--model"]),
        (["--model", "m.keras"], "", ["--data", "missing"]),
        (["--model", "m.keras", "--data", "{file}"], "no arrays", ["--data", "s.yaml", ".npz"]),
        (["--workers", "2", "--step-seconds", "1", "--steps", "2", "--json", "/no/where"], "", ["--json", "/no/where"]),
        (["--workers", "2", "--step-seconds", "1", "--steps", "2", "--plot", "{file}.odd"], "", ["--plot", ".odd"]),
    ],
)
def test_the_command_names_what_is_wrong(arguments, text, words, tmp_path):
    names = {"file": tmp_path / "s.yaml", "run": tmp_path / "run.json"}
    names["file"].write_text(text)
    RUN.save(names["run"])
    with pytest.raises(HpsError) as error:
        main([argument.format(**names) for argument in arguments])
    for word in words:
        assert word in str(error.value)


# Reports


def test_the_command_compares_saves_and_draws(tmp_path, capsys):
    common = "--workers 4 --speeds 1,1,0.5,0.25 --step-seconds 50ms --jitter 0 --samples 25600 --parameters 1M"
    models = "--consistency bsp --consistency asp --consistency wasp:10"
    code = main([*common.split(), *models.split(), "--json", f"{tmp_path}/o.json", "--plot", f"{tmp_path}/o.png"])
    assert code == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert set(rows) >= {"bsp", "asp", "wasp:10"}
    saved = json.loads((tmp_path / "o.json").read_text())
    assert [r["consistency"] for r in saved] == ["bsp", "asp", "wasp:10"]
    assert saved[0]["samples_per_second"] == pytest.approx(1280)
    assert saved[1]["samples_per_second"] / saved[1]["total_speed"] > 0.97
    assert saved[2]["syncs"] > 0 and sum(saved[2]["staleness"].values()) == 400
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_compares_with_bsp_and_names_what_differs():
    reports = [
        simulate(Scenario(machines(SPEEDS * times), model, samples=64 * 400))
        for times in (1, 2)
        for model in (BSP(), ASP())
    ]
    text = table(reports)
    rows = {line.rsplit("w ", 1)[0]: line.split() for line in text.splitlines() if "w " in line and "|" not in line}
    assert set(rows) == {"bsp 4", "asp 4", "bsp 8", "asp 8"}
    over = {name: float(row[5]) for name, row in rows.items()}
    assert over["bsp 4"] == over["bsp 8"] == 1 and 2.6 < over["asp 4"] <= 2.76
    assert over["asp 4"] == pytest.approx(reports[1].samples_per_second / reports[0].samples_per_second, abs=0.006)


def test_targets_and_metrics_are_in_the_table(tmp_path):
    report = simulate(unequal(epochs=3, steps=40), Recorder())
    text = table([report], [("val_accuracy", 0.6), ("loss", 0.1)])
    assert "0.7000" in text and "never" in text and f"{report.history[1]['seconds']:.4g}" in text
    report.save(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["history"][2]["epoch"] == 3
    assert isinstance(report, Report)


def test_the_command_loads_neither_keras_nor_mpi():
    code = (
        "import sys; from hps_keras.launch import main\n"
        "try: main('simulate --workers 2 --step-seconds 1 --steps 3'.split())\n"
        "except SystemExit as end: print('code', end.code)\n"
        "print([m for m in ('keras', 'tensorflow', 'jax', 'torch', 'mpi4py.MPI', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55)
    assert done.stdout.splitlines()[-2:] == ["code 0", "[]"], done.stdout + done.stderr


# Numeric mode, from the command line


@pytest.mark.backend
@pytest.mark.timeout(300)
def test_the_command_trains_a_saved_model(tmp_path, capsys):
    import keras

    random = np.random.default_rng(1)
    x = random.normal(size=(640, 8)).astype("float32")
    y = (x.sum(1) > 0).astype("float32")
    np.savez(tmp_path / "d.npz", x_train=x[:512], y_train=y[:512], x_test=x[512:], y_test=y[512:])
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy", metrics=["accuracy"])
    model.save(tmp_path / "m.keras")
    common = f"--workers 2 --step-seconds 1 --batch-size 16 --jitter 0 --epochs 2 --model {tmp_path}/m.keras"
    wanted = f"--data {tmp_path}/d.npz --evaluate-every 4 --target val_accuracy=0.8 --json {tmp_path}/o.json"
    assert main([*common.split(), *wanted.split(), "--consistency", "bsp", "--consistency", "wasp:4"]) == 0
    assert "seconds to" in capsys.readouterr().out
    bsp, wasp = json.loads((tmp_path / "o.json").read_text())
    assert [e["updates"] for e in bsp["history"]] == [4, 8, 12, 16, 16, 20, 24, 28, 32, 32]
    assert [e["seconds"] for e in bsp["history"][:5]] == pytest.approx([4, 8, 12, 16, 16])
    for report in (bsp, wasp):
        assert report["samples"] == 2 * 512 and report["workers"][0]["bytes_up"] % (4 * 9) == 0
        assert report["history"][-1]["val_accuracy"] > 0.8
    with pytest.raises(ConfigurationError, match=r"--samples: a pass holds the 512 samples of x_train"):
        main([*common.split(), *wanted.split(), "--samples", "99"])
    with pytest.raises(ConfigurationError, match=r"--model '.*d\.npz' cannot be loaded"):
        main(["--model", f"{tmp_path}/d.npz", "--data", f"{tmp_path}/d.npz", "--workers", "1", "--step-seconds", "1"])


# The documentation

PAGE = Path(__file__).resolve().parent.parent / "docs" / "simulator.md"


def shown():
    """The commands on the page whose output stands below them, with that output."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [pair for pair in pairwise(blocks) if pair[0].startswith("hpsrun") and "sum(v)" in pair[1]]


def close(said, found):
    try:
        a, b = (float(word.rstrip("%")) for word in (said, found))
    except ValueError:
        return said == found
    return a == pytest.approx(b, rel=0.05, abs=0.3)  # NumPy may draw other numbers one day


@pytest.mark.parametrize(("command", "output"), shown(), ids=["first", "servers", "widths"])
def test_the_page_shows_what_is_printed(command, output, capsys):
    main(shlex.split(command.replace("\\\n", " "))[2:])
    printed = capsys.readouterr().out
    said, found = ([line.split() for line in text.splitlines()] for text in (output, printed))
    assert [len(line) for line in said] == [len(line) for line in found]
    for one, other in zip(said, found):
        assert all(close(a, b) for a, b in zip(one, other)), f"{one} on the page, {other} is printed"


def test_every_option_on_the_page_exists():
    known = {name for action in make_parser()._actions for name in action.option_strings}
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", PAGE.read_text()))
    assert len(used) > 20 and used <= known
