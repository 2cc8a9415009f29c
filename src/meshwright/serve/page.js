"use strict";
// Turn the form into a request, and show the answer. The server has already escaped the HTML that it returns.

const PAUSE = 250; // milliseconds without a change before a request is sent
const MANY = ["precision", "ac", "offload"];
const FLAGS = ["compile", "tensor", "pipeline"];
const NUMBERS = ["batch", "seq", "devices", "nodes", "gbps"];

const knobs = document.getElementById("knobs");
const answer = document.getElementById("answer");
const command = document.getElementById("command");
const copy = document.getElementById("copy");
const status = document.getElementById("status");

let timer = 0;
let underway = null;

function request() {
  const found = { model: knobs.model.value, device: knobs.device.value };
  for (const name of NUMBERS) {
    if (knobs[name].value !== "" && !knobs[name].disabled) found[name] = Number(knobs[name].value);
  }
  if (knobs.link.value) found.link = knobs.link.value;
  for (const name of MANY) found[name] = [...knobs[name]].filter((box) => box.checked).map((box) => box.value);
  for (const name of FLAGS) found[name] = knobs[name].checked;
  return found;
}

function say(words, isError) {
  status.textContent = words;
  status.classList.toggle("error", isError);
}

// Lists that were opened stay open when the next answer arrives.
function show(html) {
  const open = new Set([...answer.querySelectorAll("details[open]")].map((part) => part.textContent.slice(0, 24)));
  charts.clear(answer);
  answer.innerHTML = html;
  for (const part of answer.querySelectorAll("details")) part.open = open.has(part.textContent.slice(0, 24));
  charts.show(answer);
}

async function ask() {
  if (underway) underway.abort();
  const mine = (underway = new AbortController());
  answer.setAttribute("aria-busy", "true");
  say("Planning …", false);
  try {
    const response = await fetch("/api/plan", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(request()),
      signal: mine.signal,
    });
    const found = await response.json();
    if (mine !== underway) return;
    if (!response.ok) throw new Error(found.error);
    show(found.html);
    command.textContent = found.command;
    copy.disabled = false;
    say(`${found.job} on ${found.cluster}, global batch ${found.batch.toLocaleString("en")}`, false);
  } catch (error) {
    if (mine !== underway || error.name === "AbortError") return;
    const gone = error instanceof TypeError;
    say(gone ? "The server does not answer; is `meshwright serve` still running?" : error.message, true);
  }
  answer.setAttribute("aria-busy", "false");
}

function later() {
  clearTimeout(timer);
  timer = setTimeout(ask, PAUSE);
}

// Show a model's defaults as placeholders.
function follow() {
  const usual = knobs.model.selectedOptions[0].dataset;
  knobs.batch.value = knobs.seq.value = "";
  knobs.batch.placeholder = usual.batch || "default";
  knobs.seq.placeholder = usual.seq || "default";
  knobs.seq.disabled = !usual.seq;
}

async function copyCommand() {
  try {
    await navigator.clipboard.writeText(command.textContent);
    copy.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(command);
    copy.textContent = "Press Ctrl-C";
  }
  setTimeout(() => (copy.textContent = "Copy"), 1500);
}

knobs.addEventListener("submit", (event) => event.preventDefault());
knobs.model.addEventListener("change", follow);
knobs.addEventListener("input", later);
copy.addEventListener("click", copyCommand);
follow();
ask();
