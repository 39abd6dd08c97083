"""How does the page about an evaluation look, on a screen and on paper?

The pairs of colours have a contrast of at least 4.5 to 1; `tests/results/test_report_page.py` computes them. Blue and
orange are told apart by all kinds of colour vision, and nothing is shown by its colour alone.
"""

LIGHT = {
    "page": "#ffffff",
    "text": "#1b1f24",
    "muted": "#59616b",
    "line": "#d0d7de",
    "soft": "#f4f6f8",
    "right": "#7fb2f0",
    "wrong": "#f6a35c",
    "curve": "#0b5cad",
    "focus": "#0b5cad",
}
DARK = {
    "page": "#14181d",
    "text": "#eceff3",
    "muted": "#a3adb8",
    "line": "#3a424c",
    "soft": "#1d232a",
    "right": "#1d558f",
    "wrong": "#8a4708",
    "curve": "#7ab7ff",
    "focus": "#7ab7ff",
}


def channels(colour: str) -> tuple[int, ...]:
    """Return red, green and blue of a colour, 0 to 255."""
    return tuple(bytes.fromhex(colour[1:]))


def _variables(colours: dict[str, str]) -> str:
    """Return the colours as variables of the style sheet; those of shades as channels, which take an opacity."""
    shades = {name: " ".join(map(str, channels(colours[name]))) for name in ("right", "wrong")}
    return "".join(f"--{name}:{value};" for name, value in {**colours, **shades}.items())


_SHEET = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Noto Sans",sans-serif}
main{max-width:64rem;margin:0 auto;padding:1.5rem 1rem 3rem}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;line-height:1.3;margin:2.5rem 0 .5rem;padding-top:1rem;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:1.25rem 0 .25rem}
p{margin:.5rem 0;max-width:46rem;overflow-wrap:anywhere}
.note,caption{color:var(--muted)}
.big{font-size:2rem;font-weight:600;line-height:1.2;margin:.25rem 0}
.big small{display:inline-block;font-size:1rem;font-weight:400}
.scroll{overflow-x:auto;max-width:100%;margin:.75rem 0}
.scroll:focus-visible{outline:3px solid var(--focus);outline-offset:2px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;padding-bottom:.5rem}
caption span{display:inline-block;position:sticky;left:0;max-width:min(46rem,calc(100vw - 3rem))}
th,td{padding:.3rem .6rem;border:1px solid var(--line);text-align:right;white-space:nowrap}
thead th{background:var(--soft)}
th[scope=row]{text-align:left;background:var(--soft);position:sticky;left:0;z-index:1}
td.text,th.text{text-align:left}
.facts{width:100%;table-layout:fixed}
.facts th,.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere;vertical-align:top}
.facts th[scope=row]{width:40%}
.matrix td,.matrix thead th{text-align:center;padding:.3rem .4rem;min-width:2.75rem}
.matrix td.zero{color:var(--muted)}
.matrix td.wrong{background:rgb(var(--wrong)/var(--s))}
.matrix td.right{background:rgb(var(--right)/var(--s));font-weight:700}
.matrix td.right{outline:2px solid var(--text);outline-offset:-3px}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:1rem;list-style:none;
margin:.75rem 0;padding:0}
.gallery img{display:block;width:8rem;height:8rem;image-rendering:pixelated;border:1px solid var(--line)}
.gallery figcaption{font-size:.9rem;line-height:1.35;margin-top:.3rem}
.gallery .note{display:block}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem 1.5rem}
figure{margin:0;break-inside:avoid}
svg{display:block;width:100%;height:auto}
svg text{fill:var(--muted);font-size:14px}
svg .up{text-anchor:end}
svg .across{text-anchor:middle}
svg .grid{stroke:var(--line)}
svg .axis{stroke:var(--muted)}
svg .line{fill:none;stroke:var(--curve);stroke-width:2;stroke-linejoin:round}
svg .dot{fill:var(--curve)}
svg .band{fill:var(--curve);opacity:.25}
svg .mark{stroke:var(--text);stroke-width:1.5;stroke-dasharray:5 4}
@media (max-width:30rem){h1{font-size:1.15rem}svg text{font-size:16px}
.gallery{grid-template-columns:repeat(2,1fr)}.gallery img{width:100%;height:auto}}
@media print{main{max-width:none;padding:0}.scroll{overflow:visible}th[scope=row]{position:static}
table{font-size:.8rem}tr,li{break-inside:avoid}h2,h3,caption{break-after:avoid}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""


def style() -> str:
    """Return the style sheet."""
    light, dark = _variables(LIGHT), _variables(DARK)
    schemes = f":root{{color-scheme:light;{light}}}"
    schemes += f"@media screen and (prefers-color-scheme:dark){{:root{{color-scheme:dark;{dark}}}}}"
    return schemes + _SHEET
