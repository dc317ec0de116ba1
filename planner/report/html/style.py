"""The HTML report's style sheet: light and dark as the reader's system is, and fit for paper."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --ink: #1c2128; --soft: #59636e; --line: #d5dae0; --card: #f5f7f9; --accent: #2f6f9f; --alarm: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14181d; --ink: #e3e7eb; --soft: #9aa5b1; --line: #343c45; --card: #1c2229; --accent: #6db3e0;
    --alarm: #ff8a80;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); overflow-wrap: break-word;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
header { overflow-wrap: anywhere; }
header { border-bottom: 1px solid var(--line); padding-bottom: 1rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .2rem 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figcaption { color: var(--soft); }
.alarm { color: var(--alarm); font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.figures dt { color: var(--soft); font-size: .82rem; }
.figures dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: .22rem .7rem .22rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th, td.whole, td:first-child { white-space: nowrap; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: .8rem 0; overflow-x: auto; }
figcaption { font-size: .85rem; margin-top: .3rem; }
figcaption span { margin-right: .9rem; white-space: nowrap; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; vertical-align: -.05em; }
svg text { fill: var(--ink); }
svg.stack { width: 100%; min-width: 34rem; height: auto; font: 12px system-ui, sans-serif; }
svg.stack text.inside { fill: #14181d; font-size: 11px; }
svg.stack line.capacity { stroke: var(--alarm); stroke-width: 1.5; stroke-dasharray: 5 3; }
svg.bar { width: 100%; min-width: 6rem; height: .8em; display: block; margin-top: .35em; }
rect.share { fill: var(--accent); }
.part-weights { fill: #8db4d9; background: #8db4d9; }
.part-gradients { fill: #8fd0c9; background: #8fd0c9; }
.part-optimizer { fill: #98c67d; background: #98c67d; }
.part-activations { fill: #f3b46e; background: #f3b46e; }
.part-logits { fill: #e89a9a; background: #e89a9a; }
.part-workspace { fill: #c9a4d4; background: #c9a4d4; }
.part-reserved { fill: #b9bec4; background: #b9bec4; }
.schedule { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
.schedule svg { display: block; width: 100%; min-width: 46rem; height: auto; }
.fine svg rect { stroke: none !important; }
.schedule svg > rect:first-of-type { fill: var(--page); }
.schedule svg rect { stroke: var(--page); stroke-width: .5px; }
.schedule svg text[pointer-events] { fill: #14181d; }
svg.scatter { width: 100%; max-width: 46rem; height: auto; font: 12px system-ui, sans-serif; }
svg.scatter .frame { fill: none; stroke: var(--soft); }
svg.scatter .grid { stroke: var(--line); stroke-width: .5; }
svg.scatter .band { fill: var(--line); opacity: .6; }
svg.scatter .diagonal { stroke: var(--ink); stroke-dasharray: 5 3; }
svg.scatter circle { fill-opacity: .7; stroke-width: 1.2; }
svg.scatter circle.hollow { fill-opacity: 0; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; font-weight: 500; }
ul { margin: .3rem 0; padding-left: 1.2rem; }
@media print {
  :root { --page: #fff; --ink: #000; --soft: #444; --line: #bbb; --card: #fff; --accent: #2f6f9f; --alarm: #b3261e; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  h2 { break-after: avoid; }
  figure, tr, .figures div { break-inside: avoid; }
  .wide, .schedule, figure { overflow: visible; }
  .schedule svg, svg.stack { min-width: 0; }
  table { font-size: 8.5pt; }
  details::details-content { content-visibility: visible; block-size: auto; }
}
"""
