"""Stands in for a training rank: the same files and events, no torch. HETRUN_FAKE says what goes wrong and where.

Shipped to the hosts by the tests. `HETRUN_FAKE="<what>:<rank>:<step>"`, several with commas; steps take 0.1 s, and
each waits for all other ranks at a TCP store of its own kind: a file per rank and step in HETRUN_FAKE_MEET.
A fault hits the first attempt; "<what>:<rank>:<step>:*" hits all. HETRUN_FAKE_SAVE_EVERY=n saves the number of the step to go on
from, every n steps and (unless HETRUN_FAKE_DEAF=1) when SIGTERM comes; HETRUN_FAKE_BEATS=1 writes heartbeats.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

NUM_STEPS = int(os.environ.get("HETRUN_FAKE_STEPS", "5"))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Rank:
    def __init__(self, folder: Path) -> None:
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        env = json.loads((folder / "env" / f"rank-{self.rank:04}.json").read_text())
        os.environ.update(env)
        self.host = env["HETRUN_HOST"]
        self.attempt = int(os.environ["HETRUN_ATTEMPT"])
        self.meet = Path(os.environ["HETRUN_FAKE_MEET"])
        if self.attempt > 1:
            self.meet /= f"attempt-{self.attempt}"
            self.meet.mkdir(exist_ok=True)
        self.saves = os.environ.get("HETRUN_FAKE_SAVE_EVERY", "")
        self.saved = self.meet.parent / "saved" if self.attempt > 1 else self.meet / "saved"
        self.stop = 0
        self.progress = folder / "progress" / f"rank-{self.rank:04}"
        self.progress.parent.mkdir(exist_ok=True)
        self.file = (folder / "events" / f"rank-{self.rank:04}.jsonl").open("w")
        self.step: int | None = None

    def event(self, event: str, **fields: object) -> None:
        line = {"event": event, "rank": self.rank, "wall_s": time.time(), **fields}
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def barrier(self, name: str) -> None:
        """Wait for all ranks; as in a real job, one that is gone breaks the connection of all others."""
        (self.meet / f"{name}-{self.rank}").touch()
        deadline_s = time.monotonic() + 60
        while len(list(self.meet.glob(f"{name}-*"))) < self.world_size:
            if list(self.meet.glob("gone-*")):
                raise ConnectionError("Connection closed by peer")
            if time.monotonic() > deadline_s:
                raise TimeoutError("barrier")
            time.sleep(0.005)

    def run(self) -> None:
        if self.saves and "HETRUN_FAKE_DEAF" not in os.environ:
            signal.signal(signal.SIGTERM, self.on_sigterm)
        self.barrier("start")
        self.event("start", host=self.host, pid=os.getpid(), torch_version="none", device="cpu")
        say(f"rank {self.rank} on {self.host} is up")
        first = int(self.saved.read_text()) if self.saves and self.saved.exists() else 0
        say(f"goes on at step {first}")
        self.barrier("loaded")
        for self.step in range(first, NUM_STEPS):
            self.beat(self.step)
            self.fault(self.step)
            time.sleep(0.1)
            if self.stop:
                (self.meet / f"step{self.step}stop-{self.rank}").touch()
            self.barrier(f"step{self.step}")
            self.event(
                "step",
                step=self.step,
                step_s=0.1,
                busy_s=0.1,
                communication_s=0.0,
                idle_s=0.0,
                loss=1.0,
                num_tokens=8,
                grad_norm=1.0,
                learning_rate=0.1,
            )
            stop = self.saves and any(self.meet.glob(f"step{self.step}stop-*"))
            if self.saves and (stop or (self.step + 1) % int(self.saves) == 0):
                self.save(self.step + 1)
            if stop:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
        self.event("end", steps=NUM_STEPS, parameters_sha="0")

    def on_sigterm(self, number: int, _: object) -> None:
        self.stop = number

    def save(self, step: int) -> None:
        if self.rank == 0:
            self.saved.write_text(str(step))
        self.barrier(f"save{step}")
        self.event("checkpoint", step=step, blocked_s=0.0, saved_s=0.0, num_bytes=1)

    def beat(self, step: int) -> None:
        if os.environ.get("HETRUN_FAKE_BEATS"):
            self.progress.write_bytes(struct.pack("<qqq", step, step + 1, 0))

    def fault(self, step: int) -> None:
        for item in os.environ.get("HETRUN_FAKE", "").split(","):
            what, _, where = item.partition(":")
            here = f"{self.rank}:{step}"
            if where == f"{here}:*" or (where == here and self.attempt == 1):
                getattr(self, f"do_{what}")()

    def do_raise(self) -> None:
        sys.stderr.write("about to raise\n")
        raise ValueError(f"bad row in batch {self.step}")

    def do_kill(self) -> None:
        """Die as when the kernel is out of memory; peers notice at once, before anybody else can."""
        (self.meet / f"gone-{self.rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def do_exit3(self) -> None:
        (self.meet / f"gone-{self.rank}").touch()
        os._exit(3)

    def do_exit0(self) -> None:
        (self.meet / f"gone-{self.rank}").touch()
        os._exit(0)

    def do_hang(self) -> None:
        time.sleep(600)

    def do_stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_stubborn(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def do_flood(self) -> None:
        for number in range(200_000):
            sys.stdout.write(f"line {number} of a rank that prints too much for anybody to read\n")

    def do_daemon(self) -> None:
        """Leave a process behind that has left every session and every parent."""
        again = "import time; time.sleep(600)"
        code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {again!r}], start_new_session=True)"
        subprocess.run([sys.executable, "-c", code], start_new_session=True, check=True)

    def do_secret(self) -> None:
        say(f"the secret is {os.environ['FAKE_SECRET']} !")
        raise ValueError(f"secret {os.environ['FAKE_SECRET']}")

    def do_env(self) -> None:
        say("ENV " + json.dumps(dict(os.environ)))


def main() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    me = Rank(Path(sys.argv[1]))
    try:
        me.run()
    except Exception as error:
        (me.meet / f"gone-{me.rank}").touch()
        me.event(
            "error",
            host=me.host,
            step=me.step,
            kind=type(error).__name__,
            message=str(error),
            traceback="traceback",
        )
        raise


if __name__ == "__main__":
    main()
