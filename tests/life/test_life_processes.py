"""Life with a program: how processes begin and end. Forks, spawned workers, interrupts, interpreter shutdown."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import ROOT, output_of, python
from helpers.recordings import recording

from gradstat.__main__ import main
from gradstat.recording import load, save

# All in one program, since importing torch takes seconds; in a file, since a spawned worker imports it again.
#
# - Recordings: a child outlives its parent, whose recording is on disk by then. `backward()` is not possible after a
#   fork.
# - Bits: a child inherits the parent's thread pool, but not its threads. 8 MiB are measured in parallel, in tensors too
#   small for torch to parallelize: torch itself would wait forever for the missing threads. The alarm kills a child
#   that waits.
# - Loaders: workers check what they load, in a process that has measured before.
# - The end: the threads do not make, free or query tensors: torch releases the interpreter's lock for that, too, and
#   aborts if it cannot get it back.
PROGRAM = """
import os, signal, sys, threading
import torch
import gradstat
from gradstat._core import native

kept = []

def recorded(path, child_steps):
    model = torch.nn.Linear(2, 2)
    monitor = gradstat.Monitor(model, save_to=path)
    kept.append(monitor)  # until the end of the process, which saves the recording

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        monitor.step(1.0)

    for _ in range(3):
        step()
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(write)
        os.read(read, 1)  # until the parent is gone
        for _ in range(child_steps):
            step()
        sys.exit()
    os.close(read)
    step()
    sys.exit()

def same_bits():
    gradients = [torch.arange(1 << 14, dtype=torch.float32).sub_(1 << 13).mul_(2.0**-19) for _ in range(128)]
    gradients[1][77] = float("nan")
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in gradients]

    def numbers():
        for parameter, gradient in zip(parameters, gradients):
            parameter.data, parameter.grad = gradient, gradient.clone()
        report = gradstat.check(parameters)
        parameters[1].grad[77] = 0.0
        norm = gradstat.clip_grad_norm_(parameters, 1.0)
        return report.to_numpy().tobytes(), norm.item(), [float(p.grad[5]) for p in parameters]

    expected = numbers()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            right = numbers() == expected
            if right:
                grandchild = os.fork()  # which has lost them, too
                if grandchild == 0:
                    signal.alarm(60)
                    os._exit(0 if numbers() == expected else 1)
                right = os.waitpid(grandchild, 0)[1] == 0
            os._exit(0 if right else 1)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children] == [0, 0] and numbers() == expected

class Checked(torch.utils.data.Dataset):
    def __init__(self):
        self.model = torch.nn.Linear(2, 2)

    def __len__(self):
        return 6

    def __getitem__(self, i):
        sample = torch.full((1 << 19,), float(i))
        self.model.weight.grad = torch.full((2, 2), i + 1.0)
        report = gradstat.check_tensors([sample] * 4)
        return torch.tensor([report[3].max, report.total_norm, gradstat.check(self.model)["weight"].max])

def loaded(way):
    dataset = Checked()
    expected = [dataset[i].tolist() for i in range(6)]
    workers = 2 if way == "fork" else 1  # which imports torch anew
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=workers, multiprocessing_context=way, timeout=100
    )
    return [item.tolist() for item in loader] == expected

def measuring_until_the_end(minus):
    def work(size):
        tensors = [torch.ones(size) for _ in range(4)]
        begun.release()
        while True:
            native.load_cpu().scale_(tensors, minus)

    begun = threading.Semaphore(0)
    sizes = [1 << 8, 1 << 16, 1 << 20, 1 << 21]
    for size in sizes:
        threading.Thread(target=work, args=(size,), daemon=True).start()
    for _ in sizes:
        begun.acquire()
    threading.Event().wait(0.1)

if __name__ == "__main__":
    folder, ways = sys.argv[1], sys.argv[2:]
    torch.set_num_threads(2)
    for child_steps in (0, 2):
        child = os.fork()
        if child == 0:
            recorded(f"{folder}/{child_steps}.gradstat", child_steps)
        os.waitpid(child, 0)
    print("same bits", same_bits())
    for way in ways:
        print(way, loaded(way))
    minus = torch.full((2,), -1.0, dtype=torch.float64)
    measuring_until_the_end(minus)
    print("the end")
"""
WAYS = ("fork", "spawn")


def test_forks_workers_and_the_end_of_a_program_that_measures(tmp_path: Path) -> None:
    """A forked child computes the same bits, does not wait for missing threads, and keeps its parent's recording."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = python("-X", "faulthandler", program, tmp_path, *WAYS)
    # Coverage warns of modules imported before a fork.
    printed = [line for line in ended.stderr.splitlines() if "CoverageWarning" not in line and "self.warn(" not in line]
    assert (ended.returncode, printed) == (0, [])
    assert ended.stdout.splitlines() == ["same bits True", *(f"{way} True" for way in WAYS), "the end"]
    for child_steps, expected in ((0, 4), (2, 5)):
        assert len(load(tmp_path / f"{child_steps}.gradstat").steps) == expected


# A timer interrupts the main thread at any place, as Ctrl-C does; later results have to be right.
INTERRUPTED = """
import random, signal
import torch
import gradstat

torch.set_num_threads(1)
random.seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
slow = torch.optim.RMSprop(model.parameters(), lr=1e-3)
monitor = gradstat.Monitor(model, optimizer, on_anomaly="record", watch={"activations": 2, "updates": 2}, replay=True)
clip = gradstat.AutoClip()

def fresh():
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)

def step():
    loss = model(torch.randn(4, 4)).sum()
    fresh()
    gradstat.check(model)
    monitor.step(0.5)
    gradstat.clip_grad_norm_(model.parameters(), 1.0)
    clip.clip_(model.parameters())
    gradstat.guarded_step(optimizer, max_norm=1.0)
    gradstat.guarded_step(slow, max_norm=1.0)
    optimizer.zero_grad()

def interrupt(*_):
    raise KeyboardInterrupt

for _ in range(5):
    step()
numel = sum(parameter.numel() for parameter in model.parameters())
signal.signal(signal.SIGALRM, interrupt)
interrupted = 0
while interrupted < 60:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 6e-3))
        step()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        interrupted += 1
    # Now all is as if nothing had happened.
    fresh()
    report = gradstat.check(model)
    assert report.ok and abs(report.total_norm - 2.0 * numel**0.5) < 1e-5, report
    assert not hasattr(optimizer, "found_inf") and not hasattr(optimizer, "grad_scale")
    before = model[0].weight.detach().clone()
    assert not bool(gradstat.guarded_step(optimizer, max_norm=1.0).skipped)
    assert not torch.equal(model[0].weight, before)
    fresh()
    assert abs(gradstat.clip_grad_norm_(model.parameters(), 1.0).item() - 2.0 * numel**0.5) < 1e-3
    monitor.step(0.5)
signal.setitimer(signal.ITIMER_REAL, 0)
steps = monitor.recording().steps
assert (steps[1:] > steps[:-1]).all()
monitor.save("/dev/null")
monitor.remove()
assert not sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
print("right")
"""


def test_an_interrupt_at_any_place_leaves_everything_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    # An interrupt while coverage holds its own lock would leave it locked.
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    assert output_of(INTERRUPTED) == "right"


UNCAUGHT = """
import sys, torch, gradstat
model = torch.nn.Linear(3, 1)
monitor = gradstat.Monitor(model, save_to=sys.argv[1])
model(torch.ones(2, 3)).square().sum().backward()
monitor.step(1.0)
raise ValueError("nobody catches this")
"""


def test_an_exception_that_ends_the_program_is_in_its_recording(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNCAUGHT, str(tmp_path / "run.gradstat")]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=env, capture_output=True, timeout=120, check=False).returncode == 1
    assert load(tmp_path / "run.gradstat").meta["ended_by"] == "ValueError: nobody catches this"


def diverging(folder: Path) -> list[str]:
    """Two recordings that differ, in a name that ASCII has not."""
    for i, name in enumerate(("größe\N{PILE OF POO}", "b.weight")):
        made = recording(12, 2, incident=None, names=(name,))
        made.scalars["lr"] *= 2
        save(made, folder / f"größe{i}.gradstat")
    return [str(folder / "größe0.gradstat"), str(folder / "größe1.gradstat")]


@pytest.mark.parametrize("closed", ["pipe", "1>&-", "2>&-", "1>/dev/full"])
def test_a_verdict_does_not_depend_on_who_reads_it(closed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradstat", "diff", *diverging(tmp_path)]
    if ">" in closed:
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", *command]
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") as output:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"}
        ended = subprocess.run(command, env=env, stdout=output, stderr=subprocess.PIPE, timeout=120, check=False)
    full = b"gradstat diff: [Errno 28] No space left on device\n"
    assert (ended.returncode, ended.stderr) == ((2, full) if "full" in closed else (1, b""))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", None])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_verdict_does_not_depend_on_what_can_be_printed(
    encoding: str | None, stream: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = diverging(tmp_path)
    golden = [str(save(recording(12, 2, incident=None, seed=i), tmp_path / f"ü{i}.gradstat")) for i in range(3)]
    stored = io.BytesIO()
    monkeypatch.setattr(sys, stream, encoding and io.TextIOWrapper(stored, encoding, write_through=True))
    for arguments, status in (
        (["view", runs[0]], 0),
        (["view", f"{runs[0]}ü"], 2),
        (["diff", *runs], 1),
        (["golden", "make", *golden, "-o", str(tmp_path / "gölden")], 0),
        (["golden", "check", runs[0], str(tmp_path / "gölden")], 1),
        (["golden", "check", runs[0], runs[0]], 2),
        (["info"], 0),
    ):
        assert main(arguments) == status
    shown = stored.getvalue().decode(encoding) if encoding else ""
    name = "größe" if encoding in ("latin-1", "utf-8") else "gr\\xf6\\xdfe"
    assert (name in shown) == (encoding is not None)
