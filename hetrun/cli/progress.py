"""What a person sees while hosts work: one live line on a terminal, plain lines now and then elsewhere.

Writing is left to the console that `render.py` hands in; what happened is told by probe, profile and launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from hetrun.cli.tables import cell
from hetrun.errors import StoppedError
from hetrun.model import ErrorEvent, EvaluationEvent, Event, HostFacts, Plan, StartEvent, StepEvent
from hetrun.report.words import count, format_loss, format_percent, format_rate, format_seconds

PLAIN_EVERY_S = 5.0
SHOWN_RANK = 0  # only this rank's own lines are shown; those of all ranks are in the run's logs


class LiveLine:
    """One line that redraws itself on a terminal; nothing at all elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_live = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None

    def line(self) -> Text:
        """The line as it stands now; called from the thread that redraws."""
        raise NotImplementedError

    def say(self, text: Text) -> None:
        """Write one line that stays."""
        self.console.print(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self.line()
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line

    def __enter__(self) -> LiveLine:
        if self.is_live:
            self._live = Live(self, console=self.console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


class HostProgress(LiveLine):
    """`progress(host, what)` of probe and profile: how many hosts are through, and what the last one said."""

    def __init__(self, console: Console, name: str, num_hosts: int, *, what: str = "hosts") -> None:
        super().__init__(console)
        self.name = name
        self.what = what
        self.num_hosts = num_hosts
        self._done: set[str] = set()
        self._last = ""
        self._lock = threading.Lock()

    def __call__(self, host: str, what: str | HostFacts) -> None:
        """A host is through; failures stay on the screen."""
        said, failed = _host_answer(what)
        with self._lock:
            self._done.add(host)
            self._last = f"{host}: {said}"
            if failed or not self.is_live:
                self.say(cell(f"{self._count()}  {self._last}", "red" if failed else ""))

    def line(self) -> Text:
        """Such as "probe 3/8 hosts  a3: 4 devices"."""
        return cell(f"{self._count()} {self.what}  {self._last}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt):  # by now all channels are closed
            raise StoppedError(
                f"{self.name} interrupted at {len(self._done)} of {self.num_hosts} {self.what}: "
                "hosts end what it ran there, nothing stays running, and no result was written"
            ) from error

    def _count(self) -> str:
        return f"{self.name} {len(self._done)}/{self.num_hosts}"


class LaunchView(LiveLine):
    """Follows a run as launch's observer: step, loss, throughput, time so far and time to go."""

    def __init__(self, console: Console, plan: Plan, *, clock: Callable[[], float]) -> None:
        super().__init__(console)
        self.num_steps = plan.recipe.train.steps
        self.num_ranks = len(plan.split.ranks)
        self.label = " (modelled)" if plan.emulated else ""
        self._clock = clock
        self._start_s = clock()
        self._said_s = clock()
        self._first_s: float | None = None  # when the first step was seen
        self._first_step = 0
        self._seen_s = clock()  # when the last step was seen
        self._last: StepEvent | None = None
        self._evaluated = -1  # last step that a held-out loss was said for
        self._up: set[int] = set()
        self._status = ""
        self._lock = threading.Lock()

    def on_status(self, host: str, text: str) -> None:
        """A host has got further, such as "torchrun started"."""
        with self._lock:
            status = f"{host}: {text}"
            if status != self._status and not self.is_live:
                self.say(cell(status))
            self._status = status

    def on_event(self, event: Event) -> None:
        """A rank wrote an event; the first rank to end a step speaks for all, since loss is shared."""
        with self._lock:
            if isinstance(event, StartEvent):
                self._up.add(event.rank)
            elif isinstance(event, ErrorEvent):
                where = f"rank {event.rank} on {event.host}"
                self.say(cell(f"{where} raised {event.kind}: {event.message}", "red"))
            elif isinstance(event, StepEvent) and self._is_news(event):
                self._on_step(event)
            elif isinstance(event, EvaluationEvent) and event.step > self._evaluated:
                self._evaluated = event.step
                words = f"held-out loss {format_loss(event.loss)} after step {event.step + 1}"
                self.say(cell(words))

    def on_line(self, host: str, rank: int | None, line: str) -> None:
        """A rank wrote a line of its own."""
        if rank == SHOWN_RANK:
            self.say(Text.assemble((f"{host}/{rank} ", "dim"), cell(line.rstrip("\n"))))

    def line(self) -> Text:
        """Such as "step 12/100 (12 %)  loss 5.524  2,164 tokens/s  elapsed 62.0 s  ETA 3 min 10 s"."""
        now_s = self._clock()
        parts = [f"elapsed {format_seconds(now_s - self._start_s)}"]
        event = self._last
        if event is None:
            up = f"{len(self._up)} of {count(self.num_ranks, 'rank')} up"
            return cell("  ".join([f"starting: {up}", *parts, self._status]))
        done = event.step + 1
        rate = format_rate(event.num_tokens / event.step_s, "tokens") if event.step_s > 0 else ""
        eta_s = self.seconds_left(now_s)
        if eta_s is not None:
            parts.append(f"ETA {format_seconds(eta_s)}")
        share = format_percent(done / self.num_steps, 0)
        step = f"step {done}/{self.num_steps} ({share})"
        return cell("  ".join([step, f"loss {format_loss(event.loss)}", rate + self.label, *parts]))

    def seconds_left(self, now_s: float) -> float | None:
        """Time to go at the pace since the first step, on this machine's clock; None before two steps."""
        if self._last is None or self._first_s is None or self._last.step == self._first_step:
            return None
        pace_s = (self._seen_s - self._first_s) / (self._last.step - self._first_step)
        left_s = pace_s * (self.num_steps - 1 - self._last.step)
        return max(0.0, left_s - (now_s - self._seen_s))

    def _is_news(self, event: StepEvent) -> bool:
        return self._last is None or event.step > self._last.step

    def _on_step(self, event: StepEvent) -> None:
        now_s = self._clock()
        if self._first_s is None:
            self._first_s, self._first_step = now_s, event.step
        self._last, self._seen_s = event, now_s
        is_edge = self._first_s == now_s or event.step + 1 == self.num_steps
        if not self.is_live and (is_edge or now_s - self._said_s >= PLAIN_EVERY_S):
            self._said_s = now_s
            self.say(self.line())


def _host_answer(what: str | HostFacts) -> tuple[str, bool]:
    if isinstance(what, HostFacts):
        return (what.error, True) if what.error else (count(len(what.devices), "device"), False)
    return what, what.startswith("failed")
