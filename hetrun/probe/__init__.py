"""`hetrun probe`: ask each host which devices it has, with a shell only. How fast they are is left to `profile.py`.

script.py (what a host runs) -> ask.py (all hosts at once) -> answer.py (sections of text) -> host.py, with
devices.py, slices.py, doubts.py, nics.py, links.py, places.py and system.py (facts); peers.py compares
hosts' names, diff.py compares two probes.
"""

from hetrun.probe.ask import Answered, answered, probe
from hetrun.probe.diff import Change, ChangeKind, compare
from hetrun.probe.host import parse_host
from hetrun.probe.places import nearest_nics
from hetrun.probe.system import loopback_names

__all__ = [
    "Answered",
    "Change",
    "ChangeKind",
    "answered",
    "compare",
    "loopback_names",
    "nearest_nics",
    "parse_host",
    "probe",
]
