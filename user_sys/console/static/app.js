// The console: what the server says onto the page, what the person does to the server.

import { Card } from "./card.js";
import { Chart, minutes, short } from "./chart.js";
import { Hand } from "./drive.js";
import { Link } from "./link.js";

const DRIVE_PERIOD_MS = 40;
const PING_PERIOD_MS = 1000;
const STOP_REPEAT_MS = 200;
const STOP_GIVE_UP_MS = 5000;
const GRANT_MS = 1500;
const MAX_EVENTS = 50;
const ORDER_KEYS = { KeyT: "take-over", KeyH: "hand-back", KeyO: "success", KeyX: "failure", Backspace: "reset" };

const el = (id) => document.getElementById(id);
const cards = new Map();
const stopping = new Map(); // robot -> when its e-stop was asked for
let me = "";
let chosen = null; // the card that the keyboard means
let driving = ""; // the robot that this page drives, by the robot's own word
let granted = { robot: "", untilMs: 0 }; // a take-over that was accepted, until the robot's status says so too

history.replaceState(null, "", "/"); // the token is not for the history or a screenshot; a cookie has taken its place

const charts = {
  success: new Chart(el("chart-success"), { percent: true, time: true, empty: "no episode yet" }),
  losses: new Chart(el("chart-losses"), { empty: "no update yet" }),
};
const hand = new Hand(onFreshKey);

const link = new Link({
  open() {
    link.send({ type: "hello", operator: sessionStorage.getItem("operator") ?? "" });
    link.send({ type: "look", on: !document.hidden });
    ping();
    alarm("");
  },
  closed(reason) {
    el("link").dataset.state = "down";
    el("link").textContent = "not connected";
    hand.letGo();
    alarm(`Not connected${reason ? `: ${reason}` : ""}. A robot that you drove holds still. To stop a robot now, use its own
      emergency stop. If the run was started again, open the address that it printed.`);
  },
  welcome(message) {
    me = message.operator;
    sessionStorage.setItem("operator", me);
    el("operator").value = me;
  },
  state(message) {
    showRun(message.view);
  },
  curves(message) {
    const named = (names) => names.flatMap((name) => message.curves.filter((curve) => curve.name === name));
    charts.success.show(named(["success", "evaluation", "helped"]));
    charts.losses.show(message.curves.filter((curve) => curve.name.includes("loss")).slice(0, 8));
  },
  reply(message) {
    if (message.order === "drive") return showRefusedDrive(message);
    // The robot holds after half a second without input: do not wait for its next status.
    const taken = message.order === "take-over" && message.accepted;
    granted = { robot: taken ? message.robot : "", untilMs: performance.now() + GRANT_MS };
    say(`${message.robot}: ${message.order}${message.accepted ? "" : ` refused: ${message.reason}`}`, message.accepted);
  },
  pong(message) {
    el("link").dataset.state = "up";
    el("link").textContent = `live · ${Math.max(1, Math.round(performance.now() - message.sent_ms))} ms`;
  },
  picture(header, jpeg) {
    return cards.get(header.robot)?.picture(header, jpeg) ?? Promise.resolve();
  },
});

function percent(share) {
  return share === null ? "–" : `${Math.round(share * 100)}%`;
}

function showRun(view) {
  el("run").textContent = view.run;
  el("store-full").hidden = !view.metrics.gateway?.store_full;
  el("p-time").textContent = minutes(view.elapsed_s);
  el("p-trained").textContent = minutes(view.training_s) + (view.budget_s ? ` / ${minutes(view.budget_s)}` : "");
  el("p-episodes").textContent = short(view.episodes);
  el("p-steps").textContent = short(view.env_steps);
  el("p-updates").textContent = short(view.updates);
  el("p-success").textContent = percent(view.success);
  el("p-helped").textContent = percent(view.helped);
  for (const robot of view.robots) {
    if (!cards.has(robot.name)) addCard(robot.name);
    cards.get(robot.name).show(robot, me);
  }
  followControl();
  confirmStops();
}

function addCard(name) {
  const card = new Card(name, (order) => give(name, order), () => choose(card));
  cards.set(name, card);
  el("no-robots").hidden = true;
  el("robots").append(card.node);
  if (!chosen) choose(card);
}

function choose(card) {
  if (chosen?.mine) return; // let go of one robot before you reach for the next
  chosen?.node.classList.remove("chosen");
  chosen = card;
  card.node.classList.add("chosen");
}

function followControl() {
  const held = [...cards.values()].find((card) => card.mine);
  const now = held?.name ?? "";
  if (now && now !== driving) {
    hand.letGo();
    choose(held);
  }
  driving = now;
  document.body.classList.toggle("driving", Boolean(now));
  el("operator").disabled = Boolean(now);
  el("drive-hint").textContent = now ? `you drive ${now}` : chosen?.heldMine ? "held: press a key to resume" : "take a robot over first";
}

function give(robot, order) {
  const card = cards.get(robot);
  if (order !== "e-stop" && card.button(order).disabled) return;
  if (order === "take-over" && !card.heldMine) hand.setGripper(0);
  if (order === "e-stop") return stop(robot);
  if (!link.send({ type: "order", robot, order })) say(`${robot}: ${order} not sent, no connection`, false);
}

// A stop is repeated until the robot says that it has stopped.
function stop(robot) {
  stopping.set(robot, performance.now());
  granted.robot = "";
  hand.letGo();
  link.send({ type: "order", robot, order: "e-stop" });
}

function confirmStops() {
  for (const robot of stopping.keys()) {
    if (cards.get(robot)?.status?.authority === "stopped") stopping.delete(robot);
  }
}

function repeatStops() {
  for (const [robot, since] of stopping) {
    link.send({ type: "order", robot, order: "e-stop" });
    if (performance.now() - since > STOP_GIVE_UP_MS) {
      stopping.delete(robot);
      alarm(`${robot} has not confirmed the stop. Use its own emergency stop.`);
    }
  }
}

function onFreshKey(code) {
  if (!chosen) return;
  if (code === "KeyG" && chosen.mine) hand.toggleGripper();
  if (chosen.heldMine) give(chosen.name, "take-over");
}

function sendInput() {
  const robot = driving || (performance.now() < granted.untilMs ? granted.robot : "");
  if (!robot || document.hidden) return;
  link.send({ type: "drive", robot, move: hand.move(el("speed").value / 100), gripper: hand.gripper });
}

function typing(event) {
  return event.target === el("operator") && event.code !== "Space";
}

function onKeyDown(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event)) return;
  hand.slow = event.shiftKey;
  const index = Number(event.key) - 1;
  if (event.code === "Space") {
    if (!event.repeat) stopAll();
  } else if (hand.press(event.code)) {
    // lit and sent by the next tick
  } else if (event.code in ORDER_KEYS) {
    if (!event.repeat && chosen) give(chosen.name, ORDER_KEYS[event.code]);
  } else if (index >= 0 && index < cards.size) {
    choose([...cards.values()][index]);
  } else {
    return;
  }
  event.preventDefault();
}

function onKeyUp(event) {
  hand.slow = event.shiftKey;
  hand.release(event.code);
  if (event.code === "Space") event.preventDefault(); // else it clicks the button that has the focus
}

function stopAll() {
  for (const robot of cards.keys()) stop(robot);
}

function showRefusedDrive(message) {
  el("drive-hint").textContent = message.reason;
}

function say(text, good) {
  if (el("events").firstElementChild?.lastChild.textContent === text) el("events").firstElementChild.remove(); // a repeat
  const item = document.createElement("li");
  const time = document.createElement("time");
  time.textContent = new Date().toTimeString().slice(0, 8);
  item.append(time, text);
  item.classList.toggle("refused", !good);
  el("events").prepend(item);
  while (el("events").childElementCount > MAX_EVENTS) el("events").lastElementChild.remove();
}

function alarm(text) {
  el("alarm").textContent = text;
  el("alarm").hidden = !text;
}

function ping() {
  link.send({ type: "ping", sent_ms: performance.now() });
}

function onHidden() {
  if (document.hidden) hand.letGo();
  link.send({ type: "look", on: !document.hidden });
}

el("stop-all").addEventListener("click", stopAll);
el("speed").addEventListener("input", () => (el("speed-value").textContent = `${el("speed").value}%`));
el("operator").addEventListener("focus", () => el("operator").select());
el("operator").addEventListener("change", () => {
  if (el("operator").checkValidity()) link.send({ type: "hello", operator: el("operator").value });
  el("operator").blur();
});
window.addEventListener("keydown", onKeyDown, { capture: true });
window.addEventListener("keyup", onKeyUp, { capture: true });
window.addEventListener("blur", () => hand.letGo());
document.addEventListener("visibilitychange", onHidden);
setInterval(sendInput, DRIVE_PERIOD_MS);
setInterval(repeatStops, STOP_REPEAT_MS);
setInterval(ping, PING_PERIOD_MS);
