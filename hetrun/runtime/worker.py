"""Entry point of one rank: `python -m hetrun.runtime.worker JOBDIR`, started by torchrun on every host.

The only reader of `os.environ`. It loads the rank's own environment first and torch after that, since vendor
libraries read their variables while they load. Exit code 0 = all steps done, 1 = failed, with an error event
before it where the disk allows.

SIGTERM or SIGINT with checkpoints in the recipe: the step is finished and saved, then the rank ends by that signal.

Variables: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT come from torchrun; HETRUN_HOST from the env file.
HETRUN_TEST_FAULT="raise|kill|exit|hang:RANK:STEP" makes one rank fail before one step, to test what follows.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hetrun.arch import need_trainable
from hetrun.errors import ConfigError, HetrunError, StorageError
from hetrun.model import Plan, RankPlan
from hetrun.runtime.events import EventWriter, error_event
from hetrun.runtime.heartbeat import Heartbeat
from hetrun.runtime.job import data_cache, events_path, progress_path, read_env, read_plan
from hetrun.runtime.process import Stop, die_with_parent, leave

log = logging.getLogger(__name__)

_FAULTS = ("raise", "kill", "exit", "hang")
_FAULT_EXIT_CODE = 3
_HANG_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What torchrun and launch say about this process."""

    rank: int
    local_rank: int
    world_size: int
    host: str
    fault: str | None


@dataclass(slots=True, kw_only=True)
class LastWords:
    """Tells what the body raises: traceback and hint on stderr, then an error event if the file is open."""

    rank: int | None = None
    host: str = ""
    step: int | None = None  # the one this rank is in
    events: EventWriter | None = None

    def __enter__(self) -> LastWords:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        log.error("rank %s failed", self.rank, exc_info=error)
        if isinstance(error, HetrunError) and error.hint:
            log.error("hint: %s", error.hint)
        if self.events is None or self.rank is None:
            return
        event = error_event(error, trace, rank=self.rank, host=self.host, step=self.step)
        try:
            self.events.write(event)
        except StorageError as second:
            log.error("this error is in no event: %s", second)  # noqa: TRY400 - it says all


def main() -> NoReturn:
    """Run one rank and leave with its exit code; no thread, no group and no child outlives it."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    code = 1
    try:
        with LastWords() as last_words:
            if len(sys.argv) != 2:
                raise ConfigError(f"got {len(sys.argv) - 1} arguments, need the job directory")
            _run(Path(sys.argv[1]), last_words)
        code = 0
    finally:
        leave(code)


def read_place(environment: Mapping[str, str]) -> Place:
    """Read what torchrun and the env file say.

    Raises:
        ConfigError: a variable is missing or no number.
    """
    values = {}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        text = environment.get(name, "")
        if not text.isdecimal():
            raise ConfigError(f"{name}={text!r}, need a number", hint="torchrun sets it")
        values[name] = int(text)
    return Place(
        rank=values["RANK"],
        local_rank=values["LOCAL_RANK"],
        world_size=values["WORLD_SIZE"],
        host=environment.get("HETRUN_HOST", ""),
        fault=environment.get("HETRUN_TEST_FAULT"),
    )


def check_place(place: Place, plan: Plan) -> RankPlan:
    """Compare where this process is with where the plan wants it.

    Raises:
        ConfigError: another world size, host or local rank, or a model that cannot be trained here.
    """
    need_trainable(plan)
    hint = "start the run again: hetrun launch plan.json"
    ranks = plan.split.ranks
    if place.world_size != len(ranks):
        raise ConfigError(
            f"torchrun started {place.world_size} ranks, the plan has {len(ranks)}", hint=hint
        )
    planned = ranks[place.rank]
    found, wanted = (place.host, place.local_rank), (planned.host, planned.local_rank)
    if found != wanted:
        raise ConfigError(
            f"rank {place.rank} is local rank {found[1]} on {found[0]!r}, the plan has it as local rank"
            f" {wanted[1]} on {wanted[0]!r}",
            hint=hint,
        )
    return planned


def fault_hook(text: str | None, rank: int) -> Callable[[int], None]:
    """Turn HETRUN_TEST_FAULT into a function that is told each step's number.

    Raises:
        ConfigError: the text is no "raise|kill|exit|hang:RANK:STEP".
    """
    if not text:
        return lambda step: None
    kind, _, numbers = text.partition(":")
    fault_rank, _, fault_step = numbers.partition(":")
    if kind not in _FAULTS or not (fault_rank.isdecimal() and fault_step.isdecimal()):
        raise ConfigError(f"HETRUN_TEST_FAULT={text!r}, need raise|kill|exit|hang:RANK:STEP")

    def hook(step: int) -> None:
        if (rank, step) == (int(fault_rank), int(fault_step)):
            _fail(kind)

    return hook


def _fail(kind: str) -> None:
    log.warning("HETRUN_TEST_FAULT: %s", kind)
    match kind:
        case "raise":
            raise RuntimeError("HETRUN_TEST_FAULT asked for this")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            leave(_FAULT_EXIT_CODE)
        case _:
            time.sleep(_HANG_S)


def _run(job_dir: Path, last_words: LastWords) -> None:
    die_with_parent()
    rank = read_place(os.environ).rank
    last_words.rank = rank
    last_words.events = EventWriter(events_path(job_dir, rank))
    os.environ.update(read_env(job_dir, rank))
    place = read_place(os.environ)
    last_words.host = place.host
    plan = read_plan(job_dir)
    planned = check_place(place, plan)
    if planned.visible_env is not None and planned.visible_id is not None:
        os.environ[planned.visible_env] = planned.visible_id
    fault = fault_hook(place.fault, rank)
    stop = Stop()

    def before_step(step: int) -> None:
        last_words.step = step
        if plan.recipe.checkpoint is not None:
            stop.watch()  # not before: a rank that still waits for others ends at once
        fault(step)

    from hetrun.runtime import loop  # torch comes only now, with the environment complete

    store = loop.meet(plan)
    is_done = loop.run(
        plan,
        planned,
        store=store,
        cache_dir=data_cache(job_dir),
        hooks=loop.Hooks(
            write=last_words.events.write,
            before_step=before_step,
            stop_wanted=stop.is_wanted,
            heartbeat=Heartbeat(progress_path(job_dir, rank)),
        ),
    )
    if not is_done:
        last_words.events.close()
        stop.end()


if __name__ == "__main__":
    main()
