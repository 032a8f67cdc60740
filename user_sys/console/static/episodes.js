// The episodes of the run: find, play, compare, label and export them.

import { Player } from "./player.js";

const REFRESH_PERIOD_MS = 5000;
const el = (id) => document.getElementById(id);
const form = el("query");
let players = [];
let newest = 0; // of the list's requests: an older answer that comes later is dropped

async function refresh() {
  const number = ++newest;
  const given = [...new FormData(form)].filter(([, value]) => value);
  const values = given.flatMap(([name, value]) => (name === "date" ? day(value) : [[name, value]]));
  const response = await fetch(`/api/episodes?${new URLSearchParams(values)}`).catch(() => null);
  if (number !== newest) return;
  if (!response?.ok) return problem(response ? await response.text() : "no reply from the run");
  problem("");
  const found = await response.json();
  choices("robot", found.robots);
  choices("task", found.tasks);
  choices("source", found.sources);
  const shown = found.episodes.length;
  el("count").textContent = `${found.matching} episodes${shown < found.matching ? `, the newest ${shown} shown` : ""}`;
  el("list").replaceChildren(...found.episodes.map(row));
}

// The day's begin and end, as this browser's clock shows the starts of episodes.
function day(date) {
  const end = new Date(`${date}T00:00`);
  const begin = end.getTime();
  end.setDate(end.getDate() + 1);
  return [["from_unix_ms", begin], ["until_unix_ms", end.getTime()]];
}

function choices(name, values) {
  const select = form.elements[name];
  const known = [...select.options].map((option) => option.value).join();
  if (known === ["", ...values].join()) return;
  const chosen = select.value;
  select.replaceChildren(new Option("all", ""), ...values.map((value) => new Option(value, value)));
  select.value = chosen;
}

function row(episode) {
  const tr = document.createElement("tr");
  const [low, high] = episode.policy_versions;
  const version = low < 0 ? "–" : low === high ? low : `${low}–${high}`;
  const outcome = episode.deleted ? "deleted" : { true: "yes", false: "no", null: "–" }[episode.success];
  const helped = episode.intervention_steps ? ` (${episode.intervention_steps})` : "";
  const start = new Date(episode.started_unix_ns / 1e6).toLocaleString("sv");
  const cells = [start, episode.robot, episode.task, outcome, `${episode.steps}${helped}`, version];
  tr.append(...cells.map((text) => Object.assign(document.createElement("td"), { textContent: text })));
  const opener = document.createElement("button");
  opener.type = "button";
  opener.textContent = start;
  opener.title = episode.episode;
  tr.firstChild.replaceChildren(opener);
  tr.dataset.episode = episode.episode;
  tr.classList.toggle("open", players.some((player) => player.episode === episode.episode));
  tr.addEventListener("click", (event) => open(episode.episode, event.shiftKey));
  return tr;
}

async function open(episode, beside) {
  if (players.some((player) => player.episode === episode)) return;
  const player = new Player(episode, () => close(player), refresh);
  for (const other of beside ? players.slice(1) : players) other.remove();
  players = [...(beside ? players.slice(0, 1) : []), player];
  el("players").replaceChildren(...players.map((each) => each.node));
  markOpen();
  for (const other of players) other.showTraces();
  await player.load();
}

function close(player) {
  player.remove();
  players = players.filter((each) => each !== player);
  for (const other of players) other.showTraces();
  markOpen();
}

function markOpen() {
  for (const tr of el("list").children) {
    tr.classList.toggle("open", players.some((player) => player.episode === tr.dataset.episode));
  }
}

function problem(text) {
  el("problem").textContent = text;
}

form.addEventListener("change", refresh);
form.addEventListener("submit", (event) => event.preventDefault());
el("refresh").addEventListener("click", refresh);
setInterval(() => document.hidden || refresh(), REFRESH_PERIOD_MS);
refresh();
