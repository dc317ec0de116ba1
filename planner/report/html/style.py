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
header p { max-width: none; }
header { border-bottom: 1px solid var(--line); padding-bottom: 1rem; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: .2rem 0 .4rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
.layout { font-size: 1.15rem; font-weight: 600; margin: 0 0 .3rem; }
p { margin: .4rem 0; max-width: 46rem; }
.soft, figcaption { color: var(--soft); }
.alarm { color: var(--alarm); font-weight: 600; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; }
.figures dt { color: var(--soft); font-size: .82rem; }
.figures dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures dd.note { font-size: .8rem; font-weight: 400; color: var(--soft); text-wrap: balance; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th { text-align: left; color: var(--soft); font-weight: 500; }
tbody th { white-space: nowrap; }
th, td { padding: .22rem .7rem .22rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th, td.whole, td:first-child { white-space: nowrap; }
td.num, th.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.total td { font-weight: 600; border-bottom: 0; }
code { font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
figure { margin: .6rem 0; overflow-x: auto; }
figcaption { font-size: .85rem; margin-top: .3rem; }
svg.chart { display: block; width: 100%; height: auto; stroke-linejoin: round; stroke-linecap: butt; }
svg.chart text { font-family: inherit !important; }
svg.bar { width: 100%; min-width: 5rem; height: .8em; display: block; margin-top: .35em; }
rect.share { fill: #0072b2; }
.beside { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 0 2rem; }
.beside > * { min-width: 0; }
.zoom > span, .zoom label { font-size: .85rem; color: var(--soft); }
.zoom label { margin-right: .5rem; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .5rem; }
.scroll svg.chart { min-width: 46rem; }
.zoom input:nth-of-type(2):checked ~ .scroll svg.chart { width: 200%; }
.zoom input:nth-of-type(3):checked ~ .scroll svg.chart { width: 400%; }
figure.large svg.chart { min-width: 38rem; }
@media screen and (max-width: 40rem) {
  main { padding: 1rem .9rem 3rem; }
  table { font-size: .82rem; }
  th, td { padding-right: .5rem; }
  .figures { grid-template-columns: 1fr 1fr; }
  svg.bar { min-width: 2rem; }
  .folds thead { display: none; }
  .folds table, .folds tbody, .folds tr, .folds td { display: block; }
  .folds tr { border-bottom: 1px solid var(--line); padding: .4rem 0; }
  .folds td, .folds td.num { border: 0; padding: 0; text-align: left; white-space: normal; }
  .folds td.num:not(:first-child) { display: inline-block; margin-right: .7rem; }
  .folds td:first-child { font-weight: 600; }
  .folds td:empty { display: none; }
  .folds td[data-head]:not(:first-child)::before { content: attr(data-head) ": "; color: var(--soft); }
}
pre { background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .5rem .7rem; margin: .6rem 0;
  white-space: pre-wrap; overflow-wrap: anywhere; user-select: all; -webkit-user-select: all; }
details { border-top: 1px solid var(--line); padding: .4rem 0; }
summary { cursor: pointer; font-weight: 500; }
ul { margin: .3rem 0; padding-left: 1.2rem; }
@media print {
  :root {
    color-scheme: light;
    --page: #fff; --ink: #000; --soft: #444; --line: #ccc; --card: #fff; --accent: #2f6f9f; --alarm: #b3261e;
  }
  @page { size: A4; margin: 10mm 12mm; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  body { font-size: 8.5pt; line-height: 1.35; }
  main { max-width: none; padding: 0; }
  h1 { font-size: 14pt; }
  h2 { font-size: 10pt; margin: .8em 0 .2em; break-after: avoid; }
  p { max-width: none; }
  header { padding-bottom: .3rem; }
  figure, tr, .figures div { break-inside: avoid; }
  figure { margin: .2rem 0; }
  figcaption, p.soft { font-size: 7.5pt; margin-top: .1rem; }
  h3 { font-size: 9pt; margin: .6em 0 .2em; break-after: avoid; }
  .layout { font-size: 10.5pt; }
  pre { padding: .2rem .4rem; margin: .3rem 0; }
  .wide, .scroll, figure { overflow: visible; }
  .scroll { border: 0; padding: 0; }
  .scroll svg.chart, figure.large svg.chart { min-width: 0; width: 100% !important; max-height: 115mm; }
  .beside svg.chart { max-height: 50mm; }
  .figures { grid-template-columns: repeat(5, 1fr); gap: .3rem; margin-top: .5rem; }
  .figures div { padding: .2rem .4rem; }
  .figures dd { font-size: 10.5pt; }
  .figures dt, .figures dd.note { font-size: 7.5pt; }
  .beside { grid-template-columns: 1fr 1fr; gap: 0 1.2rem; }
  h3 + .wide { break-inside: avoid; }
  ul { margin: 0; font-size: 8pt; }
  table { font-size: 7.5pt; line-height: 1.25; }
  th, td { padding: .08rem .5rem .08rem 0; }
  .zoom > :not(.scroll), details { display: none; }
}
"""
