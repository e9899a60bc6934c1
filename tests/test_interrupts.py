"""Ctrl-C is held back while a block is entered and left, and raised then."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import fastff
from fastff._torch import frozen
from fastff.interrupts import all_or_nothing, guarded, uninterrupted
from helpers import two_layers


def interrupt():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def handler():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@guarded
def block(done, at):
    """Notes what is done; Ctrl-C comes at one place."""

    def do(what):
        if what == at:
            interrupt()
        done.append(what)

    try:
        do("enter")
        yield
    finally:
        do("leave")


@pytest.mark.parametrize(
    ("at", "expected"),
    [("enter", ["enter", "leave"]), ("leave", ["enter", "body", "leave"]), ("body", ["enter", "leave"])],
)
def test_a_block_is_entered_and_left_whole(at, expected):
    """Entering and leaving are finished first; what is in the block is interrupted at once."""
    done = []

    def run():
        with block(done, at):
            if at == "body":
                interrupt()
            done.append("body")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == expected


@pytest.mark.parametrize("at", ["enter", "leave"])
def test_blocks_in_blocks(at):
    """The outer one is left too, and does not hold back what came while the inner one was left."""
    outer, inner, after = [], [], []

    def run():
        with block(outer, "never"):
            with block(inner, at):
                pass
            after.append("went on")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert (outer, inner, after) == (["enter", "leave"], ["enter", "leave"], [])


def test_an_interrupt_before_the_first_statement_of_the_clean_up():
    """There the flag of a block that is being left would not be set yet: its frame tells."""
    done = []
    made = block(done, "never")
    made.__enter__()

    class Frame:  # as the handler gets it
        f_code, f_locals, f_back = type(made).__exit__.__code__, {"self": made}, None

    made._receive(signal.SIGINT, Frame)
    assert made.held
    with pytest.raises(KeyboardInterrupt):
        made.__exit__(None, None, None)
    assert done == ["enter", "leave"]


def test_uninterrupted_until_the_end():
    done = []

    def run():
        with uninterrupted():
            interrupt()
            done.append("all")

    with pytest.raises(KeyboardInterrupt):
        run()
    assert done == ["all"]


def test_a_handler_that_does_not_raise():
    """A program may note Ctrl-C and go on: the block runs, entered."""
    seen, done = [], []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with block(done, "enter"):
            done.append("body")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done, seen) == (["enter", "body", "leave"], [signal.SIGINT])


def test_other_threads_need_nothing():
    done = []
    thread = threading.Thread(target=lambda: fastff.usage(two_layers(), torch.randn(3, 5).double()) and done.append(1))
    thread.start()
    thread.join()
    assert done == [1]


def test_tensors_come_back_and_what_belongs_together_follows():
    a, done = torch.zeros(2, requires_grad=True), []

    def run(commit, missing):
        with all_or_nothing([a], commit), torch.no_grad():
            a.add_(1)
            {"key": 0}[missing]

    with pytest.raises(KeyError):
        run(lambda: done.append(1), "missing")
    assert (a.tolist(), done) == ([0, 0], [])
    with pytest.raises(KeyboardInterrupt):
        run(interrupt, "key")
    assert a.tolist() == [1, 1]  # the interrupt came when all was done


@pytest.mark.slow
def test_ctrl_c_at_random_leaves_nothing_behind():
    """131 of 5289 interrupted calls left a hook, eval(), or a half-placed tree. A short run of the benchmark."""
    script = Path(__file__).parent.parent / "benchmarks" / "interrupt.py"
    command = [sys.executable, script, "--trials", "40", "--calls", "usage", "rebalance_", "Recipe", "Recipe.step"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("0 of "), run.stdout


def test_ctrl_c_does_not_leave_inference_mode_on(monkeypatch):
    """It came while a plan's tensors were made, and every parameter made afterwards could not train."""
    leave, sent = torch.inference_mode.__exit__, []

    def interrupted(self, *error):
        if not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        leave(self, *error)

    monkeypatch.setattr(torch.inference_mode, "__exit__", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:  # and with it every frame, and the mode that one of them holds
        frozen(torch.ones(2))
    assert sent
    assert not torch.is_inference_mode_enabled(), kept
