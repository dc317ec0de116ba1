// Sends the controls, and puts what comes back into the page: the same layout at once, then what the search finds.
"use strict";

const form = document.getElementById("controls");
const answer = document.getElementById("answer");
const status = document.getElementById("status");
const WAIT_MS = 120; // a typed number is asked once it stands still
let asking = null; // ends the question under way
let shown = ""; // the question whose answer is on the screen
let alternative = 0;
let timer = 0;

function controls() {
  const pairs = [...new FormData(form)].map(([name, text]) => [name, text.trim()]);
  return Object.fromEntries(pairs.filter(([, text]) => text));
}

function address() {
  const query = new URLSearchParams(controls());
  if (alternative) query.set("alternative", alternative);
  return "/?" + query;
}

async function ask() {
  clearTimeout(timer);
  if (asking) asking.abort();
  const mine = (asking = new AbortController());
  history.replaceState(null, "", address());
  answer.setAttribute("aria-busy", "true");
  let key = "";
  try {
    const response = await fetch("/answer", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ form: controls(), shown, alternative }),
      signal: mine.signal,
    });
    if (!response.ok) throw new Error((await response.text()).trim() || response.statusText);
    for await (const line of lines(response.body)) {
      if (mine.signal.aborted) return;
      if (line.kind === "asked") {
        key = line.key;
        fill(line);
      } else {
        show(line);
        if (line.state === "final") shown = key || shown;
      }
    }
  } catch (error) {
    if (mine.signal.aborted) return;
    say(`No answer: ${error.message}. Is plan serve still running?`);
    answer.prepend(problem(error.message));
  }
  if (asking === mine) answer.removeAttribute("aria-busy");
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const part of parts) yield JSON.parse(part);
  }
}

function show(line) {
  const open = new Set([...answer.querySelectorAll("details[open] > summary")].map((s) => s.textContent));
  const target = answer.querySelector("select[name=to]")?.value;
  const active = document.activeElement;
  const held = answer.contains(active) && active !== answer ? describe(active) : "";
  answer.innerHTML = line.html;
  answer.dataset.state = line.state;
  for (const details of answer.querySelectorAll("details")) {
    details.open = open.has(details.querySelector("summary").textContent);
  }
  const to = answer.querySelector("select[name=to]");
  if (to && target) to.value = target;
  if (held) ([...answer.querySelectorAll("a, button, select, summary")].find((e) => describe(e) === held) || answer).focus();
  mark(answer.querySelector("[data-field]")?.dataset.field);
  document.title = line.title;
  say(line.status);
}

function describe(element) {
  return element.tagName + (element.name || "") + element.textContent.slice(0, 60);
}

function say(words) {
  status.textContent = words;
}

function problem(words) {
  const line = document.createElement("p");
  line.className = "alarm";
  line.textContent = `No answer: ${words}. Is plan serve still running?`;
  return line;
}

function mark(field) {
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
  const control = field && form.elements[field];
  if (control && control.setAttribute) {
    control.setAttribute("aria-invalid", "true");
    const group = control.closest("details");
    if (group) group.open = true;
  }
}

function fill(line) {
  for (const [name, text] of Object.entries(line.placeholders)) {
    if (form.elements[name]) form.elements[name].placeholder = text;
  }
  const switches = document.getElementById("switches");
  if (switches.dataset.html !== line.switches && !switches.contains(document.activeElement)) {
    switches.innerHTML = switches.dataset.html = line.switches;
  }
}

function apply(link) {
  const query = new URL(link.href).searchParams;
  alternative = Number(query.get("alternative") || 0);
  for (const control of form.elements) {
    if (!control.name) continue;
    const text = query.get(control.name) || "";
    if (control.type === "checkbox") control.checked = Boolean(text);
    else if (control.tagName === "SELECT") choose(control, text);
    else control.value = text;
    const group = text && control.closest("details");
    if (group && control.name !== "model") group.open = true;
  }
  ask();
}

function choose(select, text) {
  const values = [...select.options].map((option) => option.value.trim());
  if (text && !values.includes(text)) select.add(new Option(text, text));
  select.value = [...select.options].find((option) => option.value.trim() === text)?.value ?? "";
}

async function copy(button) {
  await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
  button.textContent = "Copied";
  say("Copied the command line");
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

form.addEventListener("input", (event) => {
  alternative = 0;
  clearTimeout(timer);
  timer = setTimeout(ask, event.target.type === "text" ? 4 * WAIT_MS : 0);
});
form.addEventListener("change", (event) => {
  if (event.target.type === "text") ask();
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  alternative = 0;
  ask();
});
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[data-apply]");
  const button = event.target.closest("button[data-copy]");
  if (link && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
    event.preventDefault();
    apply(link);
  } else if (button) copy(button);
});

if (matchMedia("(max-width: 60rem)").matches) {
  for (const group of form.querySelectorAll("details")) group.open = group === form.querySelector("details");
}
alternative = Number(new URLSearchParams(location.search).get("alternative") || 0);
ask();
