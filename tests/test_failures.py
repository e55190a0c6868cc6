"""How a job ends when one of its ranks fails: on all ranks, within seconds, never with 0, saying who failed and why.

Every test starts a job that must fail. Nothing but a time-out of 600 s (HPS_TIMEOUT) would end a job that hangs, and a
launch is given far less. No process may be left over.
"""

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from ranks import run

import hps_keras as hps

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(300)]

LIMIT = 150.0


@pytest.fixture(autouse=True)
def interruptible():
    """A shell that starts the tests in the background makes it and all its children deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def alive(pid):
    """Whether a process runs; a zombie only waits for its parent to notice."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def fail(tmp_path):
    """Returns a function that runs a job, sees that it fails and that no process is left, and returns how it ended."""

    def start(function, n, **variables):
        ended = run(function, n, env={"PIDS": str(tmp_path), **variables}, timeout=LIMIT, check=False)
        pids = [int(path.name) for path in tmp_path.iterdir()]
        deadline = time.monotonic() + 20
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = list(filter(alive, pids))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert len(pids) == n, f"not all ranks started:\n{ended.output}"
        assert not left, f"left over: {left}\n{ended.output}"
        assert ended.returncode != 0, f"the job ended with 0:\n{ended.output}"
        return ended

    return start


# -- inside the ranks --


def here():
    """Notes this process; all ranks have started when it returns."""
    from mpi4py import MPI

    Path(os.environ["PIDS"], str(os.getpid())).touch()
    MPI.COMM_WORLD.Barrier()
    return hps.world_rank()


def pid_of_server():
    """A worker learns the process id of the server, the last rank."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.bcast(os.getpid(), MPI.COMM_WORLD.size - 1)


def launcher():
    """The process id of mpiexec."""
    names = ("mpiexec", "mpirun", "prterun", "mpiexec.hydra")
    return [p.pid for p in psutil.Process().parents() if p.name() in names][-1]


def idle():
    """Waits to be ended by others; a job that never ends is the test's to notice."""
    time.sleep(2 * LIMIT)


def fit(*callbacks, steps=4, units=3, optimizer=None, consistency=None, ours=True, data=None, **options):
    """Trains a small model and returns it."""
    import keras
    import numpy as np

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units), keras.layers.Dense(1)])
    optimizer = optimizer or keras.optimizers.SGD(0.01)
    model.compile(hps.DistributedOptimizer(optimizer, consistency=consistency), "mse")
    x = np.ones((8 * steps, 4), "float32")
    given = (x, x[:, :1]) if data is None else (data,)
    ours = [hps.callbacks.ParameterServer()] if ours else []
    options = {"epochs": 2, "verbose": 0, **({"batch_size": 8} if data is None else {}), **options}
    model.fit(*given, callbacks=[*ours, *callbacks], **options)
    return model


def in_batch(number, do, epoch=0):
    """A callback that calls `do` after a batch."""
    import keras

    class Trap(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if (self.epoch, batch) == (epoch, number):
                do()

    return Trap()


def fail_here():
    raise ValueError("on purpose")


# -- before fit, without Keras --


def worker_raises():
    if here() == 1:
        fail_here()
    idle()


def server_raises():
    if here() == 2:
        fail_here()
    idle()


# Scenario 29
@pytest.mark.parametrize(
    ("job", "who"),
    [(worker_raises, "worker 1 (world rank 1)"), (server_raises, "the parameter server (world rank 2)")],
    ids=["worker", "server"],
)
def test_an_exception_before_fit_ends_the_job_with_its_traceback(fail, job, who):
    said = fail(job, 3).output
    assert f"{who} failed; ending the job" in said
    assert "Traceback" in said and "fail_here" in said and "ValueError: on purpose" in said


def worker_exits_with_3():
    if here() == 1:
        sys.exit(3)


def server_exits_with_3():
    if here() == 2:
        sys.exit(3)


@pytest.mark.parametrize("job", [worker_exits_with_3, server_exits_with_3])
def test_the_exit_code_of_one_rank_is_the_job_s(fail, job):
    assert fail(job, 3).returncode == 3


def server_ends_unserved():
    """The worker of this job enters fit; its server's script ends first."""
    if here() == 0:
        fit()
        print("after fit")


def test_a_server_whose_script_ends_without_fit(fail):
    said = fail(server_ends_unserved, 2).output
    assert "the parameter server (world rank 1) failed" in said
    assert "worker 0 (world rank 0) wants to train, but this parameter server's script has ended" in said
    assert "hps.callbacks.ParameterServer()" in said and "after fit" not in said


def server_never_serves():
    if here() == 0:
        fit()
    idle()


def test_a_server_that_never_reaches_fit(fail):
    said = fail(server_never_serves, 2, HPS_TIMEOUT="3").output
    assert "worker 0 (world rank 0) failed" in said and "ExchangeTimeout" in said
    assert "the parameter server (world rank 1) has been silent for 3 s (HPS_TIMEOUT)" in said
    assert "has its script reached model.fit with hps.callbacks.ParameterServer()?" in said


# -- signals: scenario 33 --


def worker_gets_sigterm():
    if here() == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    idle()


def server_gets_sigint():
    if here() == 2:
        os.kill(os.getpid(), signal.SIGINT)
    idle()


def worker_is_killed():
    if here() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    idle()


def launcher_gets_sigterm():
    if here() == 2:
        os.kill(launcher(), signal.SIGTERM)
    idle()


def launcher_gets_sigint():
    if here() == 0:
        os.kill(launcher(), signal.SIGINT)
    idle()


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (worker_gets_sigterm, "worker 0 (world rank 0) received SIGTERM; ending the job"),
        (server_gets_sigint, "the parameter server (world rank 2) failed; ending the job"),
        (worker_is_killed, ""),
        (launcher_gets_sigterm, ""),
        (launcher_gets_sigint, ""),
    ],
)
def test_signals_before_fit(fail, job, said):
    assert said in fail(job, 3).output


def worker_gets_sigterm_in_fit():
    if here() == 0:
        fit(in_batch(2, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    fit()
    print("after fit")


def server_is_killed():
    server = pid_of_server()
    if here() == 0:
        fit(in_batch(2, lambda: os.kill(server, signal.SIGKILL)))
    fit()


def launcher_gets_sigint_in_fit():
    if here() == 0:
        fit(in_batch(2, lambda: [os.kill(launcher(), signal.SIGINT), time.sleep(1)]), steps=10_000)
    fit(steps=10_000)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (worker_gets_sigterm_in_fit, "worker 0 (world rank 0) received SIGTERM; ending the job"),
        (server_is_killed, ""),
        (launcher_gets_sigint_in_fit, ""),
    ],
)
def test_signals_in_fit(fail, job, said):
    output = fail(job, 2).output
    assert said in output and "after fit" not in output


# -- in fit --


def callback_raises():
    if here() == 1:
        fit(in_batch(1, fail_here, epoch=1))
    fit()


def data_raises():
    import numpy as np

    def batches():
        yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
        yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
        fail_here()

    fit(data=batches() if here() == 0 else None)


def update_raises():
    """The optimizer of the script fails, where it is applied: on the server."""
    import keras

    @keras.saving.register_keras_serializable()
    class Failing(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            fail_here()

    here()
    fit(optimizer=Failing(0.1))


@pytest.mark.parametrize(
    ("job", "ranks", "who"),
    [
        (callback_raises, 3, "worker 1 (world rank 1)"),
        (data_raises, 2, "worker 0 (world rank 0)"),
        (update_raises, 2, "the parameter server (world rank 1)"),
    ],
)
def test_an_exception_in_fit_ends_the_job_with_its_traceback(fail, job, ranks, who):
    said = fail(job, ranks).output
    assert f"{who} failed; ending the job" in said
    assert "Traceback" in said and "fail_here" in said and "on purpose" in said


def leaves_by_sys_exit():
    if here() == 0:
        fit(in_batch(2, sys.exit))
    fit()


def leaves_by_os_exit():
    if here() == 0:
        fit(in_batch(2, lambda: os._exit(0)))
    fit()


def catches_and_goes_on():
    """Tries to fit again after a failed fit, catches that error too, and ends as if all were well."""
    here()
    try:
        fit(in_batch(2, fail_here))
    except ValueError:
        print("caught")
    try:
        fit()
    except hps.HpsError as error:
        print(error)
    sys.exit(0)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (leaves_by_sys_exit, ["worker 0 (world rank 0) ends its process in the middle of fit"]),
        (leaves_by_os_exit, ["worker 0 (world rank 0) calls os._exit in the middle of fit"]),
        (
            catches_and_goes_on,
            [
                "caught",
                "an earlier fit on this worker did not end",
                "worker 0 (world rank 0) ends its process in the middle of fit",
            ],
        ),
    ],
)
def test_a_process_that_ends_in_fit_has_failed_whatever_its_exit_code(fail, job, said):
    output = fail(job, 2).output
    for text in said:
        assert text in output


def skips_fit():
    if here() != 1:
        fit()
    print("the end")


def test_a_worker_that_skips_fit(fail):
    said = fail(skips_fit, 3).output
    assert "worker 1 ended its script without the fit that workers [0] have entered" in said
    assert said.count("the end") == 1


# -- workers that disagree --


def other_model():
    fit(units=4 if here() == 1 else 3)


def other_epochs():
    fit(epochs=5 if here() == 1 else 2)


def other_consistency():
    fit(consistency="asp" if here() == 1 else "bsp")


@pytest.mark.parametrize(
    ("job", "said"),
    [
        (other_model, "the models of worker 0 ('here') and worker 1 ('there') differ: tensor 0 is"),
        (other_epochs, "worker 1 fits 5 epochs, worker 0 2: give all workers the same"),
        (other_consistency, "worker 1 asks for consistency 'asp', worker 0 for 'bsp': give all the same"),
    ],
)
def test_workers_that_disagree(fail, job, said):
    output = fail(job, 3).output
    assert "ConfigurationError" in output and said in output


def without_callback():
    """The worker forgets the callback."""
    fit(ours=here() == 1)


def test_a_worker_without_the_callback(fail):
    said = fail(without_callback, 2).output
    assert "worker 0 (world rank 0) failed" in said and "HpsError" in said
    assert "give model.fit(..., callbacks=[...]) hps.callbacks.ParameterServer()" in said


# -- silence: scenario 31 --

SILENCE = 4.0


def falls_silent():
    """What may take longer than the time-out, then a worker that stops."""
    import keras
    import numpy as np

    me = here()
    slow = lambda: time.sleep(1.25 * SILENCE)  # noqa: E731
    first = [in_batch(0, slow)] if me == 1 else []

    class SlowValidation(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            slow()

    model = fit(
        *first,
        *([SlowValidation()] if me == 0 else []),
        epochs=1,
        validation_data=(np.ones((1, 4)), np.ones((1, 1))) if me == 0 else None,
    )
    assert model.history.history["val_loss"]
    if me == 0:
        slow()
    print(f"worker {me} fits again")
    fit(*([in_batch(2, lambda: os.kill(os.getpid(), signal.SIGSTOP))] if me == 1 else []))
    print("after fit")


def test_a_worker_that_falls_silent_is_named_with_what_it_owes(fail):
    said = fail(falls_silent, 3, HPS_TIMEOUT=f"{SILENCE:g}").output
    assert "worker 0 fits again" in said and "worker 1 fits again" in said, f"timed out too early:\n{said}"
    assert "the parameter server (world rank 2) failed" in said and "ExchangeTimeout" in said
    assert "worker 1 fell silent" in said and "after its push number 3 of this fit" in said
    assert "it owes a push on version 3 of optimizer 0; waiting for it: workers [0]" in said and "HPS_TIMEOUT" in said
    assert "after fit" not in said


# -- data that do not belong together --


def elastic(samples, **options):
    import numpy as np

    x = np.ones((samples, 4), "float32")
    return hps.data.ElasticDataset(x, x[:, :1], batch_size=8, **options)


def orders_differ():
    here()
    fit(data=elastic(32, shuffle=hps.rank() == 0))


def samples_differ():
    here()
    fit(data=elastic(32 + hps.rank()))


def one_has_a_shard():
    here()
    fit(data=elastic(32) if hps.rank() == 0 else None)


def too_few_samples():
    here()
    fit(data=elastic(1))


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (orders_differ, "shuffle=False of the ElasticDataset of worker 1, shuffle=True of worker 0"),
        (samples_differ, "worker 1 fits an ElasticDataset of 33 samples, worker 0 an ElasticDataset of 32 samples"),
        (one_has_a_shard, "worker 1 fits ordinary data, worker 0 an ElasticDataset of 32 samples"),
        (too_few_samples, "the ElasticDataset holds 1 samples for 2 workers"),
    ],
)
def test_data_sets_that_differ_are_refused(fail, job, text):
    assert text in fail(job, 3).output
