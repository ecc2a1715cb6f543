"""What a run was worth: events of the ranks in, RunReport and one HTML page out.

`build_report(run_dir)` and `to_html(report)` are the public names; writing the files is left to the command line.
"""

from hetrun.report.build import build_report
from hetrun.report.html import to_html

__all__ = ["build_report", "to_html"]
