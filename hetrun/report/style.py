"""The page's one style sheet: light, dark, narrow and printed. Nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

NUM_COLOURS = 8  # vendors beyond that share colours; lanes carry the vendor's name as well

# Told apart by people with any kind of colour vision as far as eight hues can be; names stand beside them.
_LIGHT = ("2f6fde", "d9730d", "0f9d8a", "b4459a", "7a5bd6", "5f8f1f", "c0392b", "4d7f99")
_DARK = ("6ea0ff", "f2a154", "45c9b6", "e08ac8", "a991f2", "9cc95b", "ef8377", "8db9cf")
_LIGHT_CARD = "ffffff"
_DARK_CARD = "171b22"

_LIGHT_ROOT = """
:root{color-scheme:light;--page:#f4f5f7;--card:#ffffff;--ink:#1a1f29;--soft:#5a6472;--line:#dfe3e8;--track:#f3f4f6;
--hatch:#bcc4cf;--sync:#5d6777;--opt:#1a1f29;--onc:#ffffff;--accent:#2f6fde;--even:#9aa4b2;
--good:#1a7f4b;--goodbg:#e3f5ea;--bad:#b3261e;--badbg:#fdecea;--warn:#8a5a00;--warnbg:#fff5df;--notebg:#eef1f5}
"""
_DARK_ROOT = """
:root{color-scheme:dark;--page:#0d1015;--card:#171b22;--ink:#e7eaf0;--soft:#9ba6b5;--line:#2b323d;--track:#1e242d;
--hatch:#465162;--sync:#8b96a6;--opt:#e7eaf0;--onc:#0d1015;--accent:#6ea0ff;--even:#66707e;
--good:#6fd6a0;--goodbg:#12301f;--bad:#ff8f86;--badbg:#3a1614;--warn:#f0c265;--warnbg:#33270d;--notebg:#20262f}
"""

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"Liberation Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 48px}
h1{font-size:26px;line-height:1.3;font-weight:650;margin:10px 0 10px;letter-spacing:-.01em}
h2{font-size:17px;font-weight:650;margin:0 0 4px}
p{margin:0 0 10px}
.note{color:var(--soft);font-size:13.5px;max-width:80ch}
.top{display:flex;flex-wrap:wrap;gap:6px 10px;align-items:center;color:var(--soft);font-size:13.5px}
.top .brand{color:var(--ink);font-weight:700;letter-spacing:.01em}
.pill{display:inline-block;border-radius:999px;padding:1px 9px;font-size:12px;font-weight:600;background:var(--notebg);
color:var(--soft);white-space:nowrap}
.pill.good{background:var(--goodbg);color:var(--good)}.pill.bad{background:var(--badbg);color:var(--bad)}
.pill.warn{background:var(--warnbg);color:var(--warn)}
.verdict{color:var(--soft);font-size:15.5px;max-width:90ch;margin-bottom:18px}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px 20px;margin:14px 0}
.banner{border-radius:12px;padding:14px 20px;margin:14px 0;background:var(--badbg);color:var(--bad);border:1px solid var(--bad)}
.banner b{display:block;font-size:16px;overflow-wrap:anywhere}.banner p{margin:10px 0 0}
.banner pre,.warnings pre{margin:8px 0 0;max-height:260px;overflow:auto;font-size:12px;white-space:pre-wrap;
overflow-wrap:anywhere;color:var(--ink)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:1px;background:var(--line);
border:1px solid var(--line);border-radius:12px;overflow:hidden;margin:14px 0}
.fact{background:var(--card);padding:12px 16px}
.fact .k{color:var(--soft);font-size:12.5px}
.fact .v{font-size:20px;font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap}
.fact .d{color:var(--soft);font-size:12.5px}
.three{display:grid;grid-template-columns:repeat(3,1fr);gap:26px;margin:14px 0}
.metric .name{font-size:13.5px;color:var(--soft)}.metric .name b{color:var(--ink);font-size:15px}
.pair{display:grid;grid-template-columns:minmax(0,1fr) auto;gap:2px 12px;align-items:baseline;margin-top:10px}
.pair .who{font-size:13.5px}.pair .meter{grid-column:1/-1}
.pair .val{font-weight:650;font-variant-numeric:tabular-nums;white-space:nowrap;text-align:right}
.pair.run .val{font-size:24px;line-height:1.25}
.pair.even .val{color:var(--soft)}
.metric .pill{margin-left:6px;vertical-align:middle;font-weight:500}
.metric .def{color:var(--soft);font-size:12.5px;margin:12px 0 0}
.metric .why{color:var(--warn);font-size:12.5px;margin:6px 0 0}
svg{display:block}svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,"Liberation Sans",sans-serif;fill:var(--ink)}
svg text.axis{fill:var(--soft)}
svg.defs{position:absolute}
.grid{stroke:var(--line);stroke-width:1}.tick{stroke:var(--soft);stroke-width:1}.hatch{stroke:var(--hatch);stroke-width:2.5}
.loss{fill:none;stroke:var(--accent);stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.dot{fill:var(--accent)}.ring{fill:var(--card);stroke:var(--ink);stroke-width:1.5}
.meter{overflow:visible;margin:3px 0 2px}.meter .run{fill:var(--accent)}.meter .evn{fill:var(--even)}
.mark{stroke:var(--ink);stroke-width:1.5}rect.track{fill:var(--track)}
.chart{display:grid;grid-template-columns:48px minmax(0,1fr);padding:12px 6px 0 0}.plot{overflow:visible}
.yaxis{overflow:visible}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;font-size:13px;color:var(--soft);margin:10px 0 12px}
.legend span{display:inline-flex;gap:6px;align-items:center}
.lane{display:grid;grid-template-columns:190px minmax(0,1fr);gap:0 12px;align-items:center;margin:3px 0;break-inside:avoid}
.lane.bars{grid-template-columns:190px minmax(0,1fr) 290px}
.label{font-size:12.5px;line-height:1.25;overflow-wrap:anywhere}.label i{font-style:normal;color:var(--soft);display:block;font-size:11.5px}
.axisname{color:var(--soft)}
.shares{display:grid;grid-template-columns:repeat(3,1fr);gap:0 12px;font-size:12.5px;color:var(--soft);font-variant-numeric:tabular-nums}
.share{white-space:nowrap;text-align:right}.shares b{color:var(--ink);font-weight:600}
.f{fill:var(--c)}.b{fill:var(--d)}.w{fill:var(--d);fill-opacity:.55}.sync{fill:var(--sync)}.opt{fill:var(--opt)}
.s{stroke:var(--card);stroke-width:1;vector-effect:non-scaling-stroke}
text.n{font-size:11px;pointer-events:none}text.nf{fill:var(--onc)}text.letter{font-size:10px;font-weight:600}
.idlebox{fill:url(#idle)}
.scroll{overflow-x:auto;margin-top:10px}.scroll+.note{margin-top:12px}.note:last-child{margin-bottom:0}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:6px 14px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;color:var(--soft);font-size:12.5px;white-space:nowrap}
td.r,th.r{text-align:right;white-space:nowrap}td.t{font-weight:650}tr.total td{font-weight:650}
td i{font-style:normal;color:var(--soft);font-size:12.5px}tr:last-child td{border-bottom:0}
td .swatch{display:inline-block;vertical-align:-1px;margin-right:7px}
.warnings li{margin:4px 0;overflow-wrap:anywhere}.warnings ul,.read ul{margin:6px 0 0;padding-left:20px}
.read dt{font-weight:650;margin-top:8px}.read dd{margin:0;color:var(--soft);max-width:86ch}.read dl{margin:6px 0 0}
footer{color:var(--soft);font-size:12.5px;margin-top:18px;overflow-wrap:anywhere}
@media screen and (max-width:760px){
main{padding:18px 12px 32px}h1{font-size:21px}.card{padding:14px 14px}
.three{grid-template-columns:1fr;gap:22px}
.lane,.lane.bars{grid-template-columns:minmax(0,1fr);margin:9px 0;gap:3px}
.label i{display:inline;margin-left:6px}.shares{justify-items:start}.share{text-align:left}text.n{display:none}
.facts{grid-template-columns:repeat(2,minmax(0,1fr))}.fact{padding:10px 12px}.fact .v{font-size:17px}
.fact:last-child:nth-child(odd){grid-column:1/-1}table{min-width:660px}
}
@media print{
@page{margin:12mm}
body{background:#fff;font-size:9.5pt}main{max-width:none;padding:0}h1{font-size:17pt}h2{font-size:12pt}
.card,.facts,.banner,tr{break-inside:avoid}.card.long{break-inside:auto}h2{break-after:avoid}
.card{padding:10px 12px;margin:8px 0}.three{gap:16px}.pair.run .val{font-size:15pt}.fact{padding:7px 10px}.fact .v{font-size:12pt}
.lane{grid-template-columns:150px minmax(0,1fr)}.lane.bars{grid-template-columns:150px minmax(0,1fr) 265px}
.facts{grid-template-columns:repeat(5,1fr)}.metric .pill{padding:0 6px;font-size:8pt}.note{font-size:9pt}td i,.def{font-size:8pt}
.shares,table{font-size:8.5pt}text.n{display:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}.scroll{overflow:visible}.banner pre{max-height:none}
}
"""


def style_sheet() -> str:
    """Return the whole style sheet; dark colours apply on screens only, paper stays white."""
    dark = _DARK_ROOT + _vendor_rules(_DARK, _DARK_CARD)
    return (
        f"{_LIGHT_ROOT}{_vendor_rules(_LIGHT, _LIGHT_CARD)}"
        f"@media screen and (prefers-color-scheme:dark){{{dark}}}{_RULES}"
    )


def _vendor_rules(colours: Sequence[str], card: str) -> str:
    """Per vendor one full colour (forward) and one half way to the card behind it (backward)."""
    return "\n".join(
        f".v{index}{{--c:#{colour};--d:#{_mix(colour, card, 0.5)}}}"
        for index, colour in enumerate(colours)
    )


def _mix(a: str, b: str, share: float) -> str:
    pairs = ((int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (0, 2, 4))
    return "".join(f"{round(x * share + y * (1 - share)):02x}" for x, y in pairs)
