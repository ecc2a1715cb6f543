"""`hetrun probe`: ask each host which devices it has, with a shell only. How fast they are is left to `profile.py`.

script.py (what a host runs) -> ask.py (all hosts at once) -> answer.py (sections of text) -> host.py, with
devices.py and nics.py (facts).
"""

from hetrun.probe.ask import Answered, answered, probe
from hetrun.probe.host import parse_host

__all__ = ["Answered", "answered", "parse_host", "probe"]
