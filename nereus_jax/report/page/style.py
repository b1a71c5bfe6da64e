"""The style sheet of a page. Colours of model-stages: Okabe and Ito's palette for all kinds of
colour vision (https://jfly.uni-koeln.de/color/), with other blues where the page is dark."""

STYLE = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d8dee4;--box:#f6f8fa;
--warn:#fff4d6;--warn-ink:#5c4400;--hit:#1b1f2414;--c0:#0072b2;--c1:#56b4e9;--c2:#009e73;
--c3:#f0e442;
--c4:#cc79a7;--c5:#d55e00;--c6:#e69f00;--c7:#8c959f;--onblue:#fff}
@media(prefers-color-scheme:dark){:root{--bg:#0f1317;--ink:#e6edf3;--soft:#9aa5b1;--rule:#30363d;
--box:#171c22;--warn:#3a2f0b;--warn-ink:#f5dd90;--hit:#e6edf31f;--c0:#3d9be0;--c1:#8fd0f5;
--c2:#1fb78a;
--c5:#ee7a2b;--onblue:#111}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:76rem;background:var(--bg);color:var(--ink);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.2rem 0}h2{font-size:1.25rem;margin:2rem 0 .5rem}
h3{font-size:1rem;margin:0}a{color:inherit}
.banner{background:var(--warn);color:var(--warn-ink);padding:.6rem .9rem;border-radius:6px;
margin:.6rem 0}
.note,small{color:var(--soft);font-size:13px}.note{margin:.4rem 0}small{display:block}
td small{display:inline}td small.part{display:block}
caption{text-align:left;padding:.2rem .6rem;color:var(--soft);font-size:13px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;
margin:.8rem 0}
.facts div{background:var(--box);border-radius:6px;padding:.5rem .7rem}
.facts dt{color:var(--soft);font-size:13px}.facts dd{margin:0;font-size:1.15rem;font-weight:600}
.facts small{font-weight:400}
.figures{display:grid;grid-template-columns:minmax(0,1fr);gap:1.6rem 2.4rem;margin:1.2rem 0}
@media(min-width:900px){.figures{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}
.figures .wide{grid-column:1/-1}}
figure{margin:0;min-width:0}
figcaption{display:flex;justify-content:space-between;gap:.6rem;align-items:baseline}
.badge{flex:none;font-size:12px;padding:0 .5rem;border:1px solid var(--rule);border-radius:9px;
color:var(--soft)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem .9rem;margin:.3rem 0;padding:0;
font-size:13px;color:var(--soft)}
.key{margin-right:.35rem;vertical-align:-1px}
.plot{display:block;width:calc(100% - 4.2rem);margin:.5rem .5rem 0 3.7rem;overflow:visible;
font-size:12px}
.plot text{fill:var(--soft)}.plot text.mid{text-anchor:middle}.plot text.end{text-anchor:end}
.bands .plot{width:100%;margin-left:0}
.plot text.onband{fill:#111}.plot text.onband.s0{fill:var(--onblue)}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.l0,.s0{--c:var(--c0)}.s1{--c:var(--c1)}.l2,.s2{--c:var(--c2)}.s3{--c:var(--c3)}.s4{--c:var(--c4)}
.l1,.s5{--c:var(--c5)}.s6{--c:var(--c6)}.s7{--c:var(--c7)}
.line{fill:none;stroke:var(--c);stroke-width:2;vector-effect:non-scaling-stroke;
stroke-linejoin:round}
.line.l1{stroke-dasharray:7 4}.line.l2{stroke-dasharray:2 3}
.dot,.band{fill:var(--c)}.band{stroke:var(--bg);stroke-width:1}
.area{fill:var(--c);stroke:var(--bg);stroke-width:.5;vector-effect:non-scaling-stroke}
.move{stroke:var(--ink);stroke-width:1;stroke-dasharray:3 3}.over{fill:var(--ink)}
.hit{fill:transparent}.hit:hover{fill:var(--hit)}
.narrow{display:none}@media(max-width:899px){.wide-only{display:none}.narrow{display:inline}}
.scroll{width:fit-content;overflow-x:auto;max-width:100%;margin:.5rem 0;
border:1px solid var(--rule);
border-radius:6px}
table{border-collapse:collapse;font-size:13px;width:100%;overflow-wrap:normal;
font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;text-align:right;white-space:nowrap;vertical-align:top;
border-bottom:1px solid var(--rule)}
tr:last-child td{border-bottom:0}
th{background:var(--box);font-weight:600}th.w,td.w{text-align:left}
td.w{white-space:normal;min-width:7rem;max-width:26rem}td.w:last-child{min-width:18rem}
td.w:first-child{white-space:nowrap;min-width:0}
tr.taken td{background:var(--box);font-weight:600}
details{border:1px solid var(--rule);border-radius:6px;padding:.2rem .8rem;margin:.5rem 0;
min-width:0}
summary{cursor:pointer;padding:.3rem 0}
.run>summary{font-weight:600;font-size:1.05rem}
.verdict{border-radius:9px;padding:0 .5rem;font-size:12px;border:1px solid var(--soft)}
.verdict.admit{background:#009e73;color:#0b0f12;border-color:#009e73}
.verdict.urgent{background:#e69f00;color:#111;border-color:#e69f00}
.bar{display:flex;height:18px;background:none}
@media print{details{break-inside:avoid}}
"""
