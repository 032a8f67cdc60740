// The console: shows the server's messages, and sends the operator's input.

import { Card } from "./card.js";
import { Chart, minutes, short } from "./chart.js";
import { Hand } from "./drive.js";
import { Headset } from "./headset.js";
import { Link } from "./link.js";
import { Stops } from "./stops.js";
import { Traces } from "./traces.js";

const DRIVE_PERIOD_MS = 40;
const SEEN_PERIOD_MS = 20; // with DRIVE and PING that makes 55 messages a second, of 60: these count half
const PING_PERIOD_MS = 200;
const LOOK_PERIOD_MS = 100;
const MAX_SEEN = 60; // pictures in one message
const GRANT_MS = 1500;
const MAX_LARGE_CARDS = 2; // more robots are shown as a fleet, in small cards
const TOOL_SPEED = 0.25; // m/s, of a robot whose spec is unknown or that moves no tool
const STOPPED_MS = 1000; // until then the robot's status has changed too
const MAX_EVENTS = 50;
const LABELS = ["success", "failure"];
const ORDER_KEYS = { KeyT: "take-over", KeyH: "hand-back", KeyO: "success", KeyX: "failure", Backspace: "reset" };

const el = (id) => document.getElementById(id);
const cards = new Map();
let seen = []; // shown pictures, acknowledged every SEEN_PERIOD_MS
let pingMs = 0; // round trip to the server
let serverS = null; // the server's newest time that the page has: the server refuses an order that was sent long before
let closedFor = ""; // why the connection was closed
let me = "";
let signedIn = false; // the name is that of an account
let chosen = null; // the card that the keyboard controls
let opened = null; // the card that is shown alone
let driving = ""; // the robot that this page drives, by the robot's status
let granted = { robot: "", untilMs: 0 }; // a requested take-over, until the robot's status shows it

history.replaceState(null, "", "/"); // keeps the token out of history and screenshots; the cookie replaces it

const charts = {
  success: new Chart(el("chart-success"), { percent: true, time: true, empty: "no episode yet" }),
  losses: new Chart(el("chart-losses"), { empty: "no update yet" }),
};
const headset = new Headset(el("headset"), {
  moved: () => onFreshKey("headset"),
  toggleGripper: () => chosen?.mine && hand.toggleGripper(),
  hand: () => chosen && give(chosen.name, chosen.mine ? "hand-back" : "take-over"),
  stop: stopAll,
  show: (text) => (el("headset-hint").textContent = text),
  toolSpeed: () => (chosen?.robot?.tool_speed || TOOL_SPEED) * hand.scale,
  look: () => ({ pictures: chosen?.pictures ?? [], words: (link.fresh && chosen?.words) || "no reply from the run", warns: !link.fresh || !el("alarm").hidden }),
});
const reserved = new Set([...Object.keys(ORDER_KEYS), "Space", "Escape", "KeyJ"]);
const hand = new Hand(onFreshKey, sendInput, stepJoint, reserved, headset);
const stops = new Stops(() => me || sessionStorage.getItem("operator"), onStopped, showStops);

const traces = new Traces((robot) => link.send({ type: "trace", robot }));
const link = new Link("/ws", PING_PERIOD_MS, {
  open() {
    closedFor = "";
    seen = [];
    serverS = null;
    link.send({ type: "hello", operator: sessionStorage.getItem("operator") ?? "" });
    look();
    traces.select(traces.robot, true);
  },
  closed(reason) {
    closedFor = reason || closedFor || "not connected"; // a refused connection has no reason
    if (reason.startsWith("the sign-in has ended")) signInAgain();
    else if (!reason) signInIfRequired();
    showFreshness();
  },
  welcome(message) {
    me = message.operator;
    if (!sessionStorage.getItem("operator")) sessionStorage.setItem("operator", me); // the wish: not a name with a suffix
    el("operator").value = me;
    signedIn = message.signed_in;
    el("sign-out").hidden = !signedIn;
    document.body.dataset.role = message.role;
  },
  state(message) {
    showRun(message.view);
  },
  curves(message) {
    const named = (names) => names.flatMap((name) => message.curves.filter((curve) => curve.name === name));
    charts.success.show(named(["success", "evaluation", "helped"]));
    charts.losses.show(message.curves.filter((curve) => curve.name.includes("loss")).slice(0, 8));
  },
  trace(message) {
    traces.add(message);
  },
  reply(message) {
    if (message.order === "drive") return showRefusedDrive(message);
    if (message.order === "take-over" && !message.accepted) granted.robot = "";
    say(`${message.robot}: ${message.order}${message.accepted ? "" : ` refused: ${message.reason}`}`, message.accepted);
  },
  pong(message) {
    pingMs = performance.now() - message.sent_ms;
    serverS = message.server_s;
    el("link").textContent = `live · ${Math.max(1, Math.round(performance.now() - message.sent_ms))} ms`;
    showFreshness();
  },
  picture(header, jpeg) {
    const shown = cards.get(header.robot)?.picture(header, jpeg) ?? Promise.resolve();
    shown.finally(() => seen.push([header.robot, header.camera])); // the server then sends the newest
  },
});

function percent(share) {
  return share === null ? "–" : `${Math.round(share * 100)}%`;
}

function showRun(view) {
  el("run").textContent = view.run;
  const waiting = view.robots.filter(({ status, lost }) => (status?.authority === "requesting" || status?.awaits_reset) && !lost);
  const help = waiting.map(({ name, status }) => `${name} ${status.awaits_reset ? "waits for its scene" : "requests help"}: ${status.help}.`).join(" ");
  el("warning").textContent = [help, ...view.alarms, view.warning].filter(Boolean).join(" | ");
  el("warning").hidden = !el("warning").textContent;
  el("p-time").textContent = minutes(view.elapsed_s);
  el("p-trained").textContent = minutes(view.training_s) + (view.budget_s ? ` / ${minutes(view.budget_s)}` : "");
  el("p-episodes").textContent = short(view.episodes);
  el("p-steps").textContent = short(view.env_steps);
  el("p-updates").textContent = short(view.updates);
  el("p-success").textContent = percent(view.success);
  el("p-helped").textContent = percent(view.helped);
  el("p-tasks").textContent = Object.entries(view.tasks).map(([task, share]) => `${task} ${percent(share)}`).join(" · ");
  removeGone(new Set(view.robots.map(({ name }) => name)));
  for (const robot of view.robots) {
    if (!cards.has(robot.name)) addCard(robot.name);
    cards.get(robot.name).show(robot, me);
    if (robot.name === traces.robot && robot.status) traces.showTimeline(robot);
  }
  for (const robot of stops.pressed.keys()) if (!cards.has(robot)) addCard(robot); // it has the button that cancels
  showJoints();
  followControl();
}

// While the server does not reply, the page is outdated: only STOP is left.
function showFreshness() {
  const fresh = link.fresh;
  if (!fresh) {
    hand.letGo();
    granted.robot = "";
    el("link").textContent = link.open ? `no reply for ${seconds(link.silentMs)}` : "not connected";
  }
  el("link").dataset.state = fresh ? "up" : "down";
  const before = !document.body.classList.contains("unknown");
  if (fresh !== before) {
    document.body.classList.toggle("unknown", !fresh);
    el("operator").value = fresh ? me : "";
    for (const control of document.querySelectorAll("#operator, #speed, #tilt, #pad button, .drive .orders button, #drive-hand-back")) control.disabled = !fresh;
    for (const card of cards.values()) card.showFreshness(fresh);
    followControl();
  }
  if (!fresh || fresh !== before) showAlarm(fresh);
}

// A refused WebSocket has no reason. Without a valid sign-in the server sends a page's request to the sign-in.
async function signInIfRequired() {
  const reply = await fetch("/", { redirect: "manual" }).catch(() => null); // null: there is no server
  if (reply?.type === "opaqueredirect") signInAgain();
}

// Not while a stop is unconfirmed: its warning stays, which says what helps now.
function signInAgain() {
  if (stops.pressed.size) closedFor = "the sign-in has ended; reload this page to sign in again";
  else location.assign("/sign-in");
}

function showAlarm(fresh) {
  const cut = closedFor
    ? `Not connected: ${closedFor}. If the run was started again, open the address that it printed.`
    : `No reply for ${seconds(link.silentMs)}.`;
  const lost = fresh ? "" : `${cut} The state of the robots is unknown. One that you drove holds still.`;
  const own = lost || stops.unconfirmedText ? "To stop a robot now, use its own emergency stop." : "";
  alarm([stops.unconfirmedText, lost, own].filter(Boolean).join(" "));
}

function addCard(name) {
  const override = (order, reason) => link.send({ type: "override", robot: name, order, reason });
  const actions = { override, give: (order) => give(name, order), choose: () => choose(card), open: () => openAlone(card) };
  const card = new Card(name, actions, stops);
  cards.set(name, card);
  el("robots").append(...ordered().map((each) => each.node));
  if (!chosen) choose(card);
  showLayout();
}

// Removes the cards of robots that the run does not have: another run has taken the console's port. A card that shows only
// an unconfirmed stop stays.
function removeGone(names) {
  const gone = [...cards.values()].filter(({ name, robot }) => !names.has(name) && (robot || !stops.pressed.has(name)));
  for (const card of gone) {
    card.node.remove();
    cards.delete(card.name);
    if (chosen === card) chosen = null;
    if (opened === card) opened = null;
  }
  if (gone.length) showLayout();
}

function ordered() {
  return [...cards.values()].sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
}

// `card`: the robot to show alone, or null for all.
function open(card) {
  opened = card;
  showLayout();
}

// Shows the robot that the keyboard controls: `card`, or the driven one until it is handed back.
function openAlone(card) {
  choose(card);
  if (chosen !== card) say(`${card.name}: hand back ${driving} first`, false);
  open(chosen);
}

function showLayout() {
  const many = cards.size > 1;
  el("robots").classList.toggle("fleet", cards.size > MAX_LARGE_CARDS && !opened);
  el("all-robots").hidden = !many || !opened;
  el("no-robots").hidden = cards.size > 0;
  for (const card of cards.values()) {
    card.node.hidden = many && Boolean(opened) && card !== opened;
    card.slot("name").disabled = !many;
  }
  const alone = opened ?? (cards.size === 1 ? [...cards.values()][0] : null);
  traces.select(alone?.name ?? "");
  look();
}

function choose(card) {
  if (!driving || chosen?.name !== driving) select(card); // release one robot before you select the next
}

function select(card) {
  chosen?.node.classList.remove("chosen");
  chosen = card;
  card.node.classList.add("chosen");
  showJoints();
}

// What W and S move: the tool, or one joint of the chosen robot.
function showJoints() {
  const { joints = [], moves_tool: movesTool = true } = chosen?.robot ?? {};
  el("joint-refusal").textContent = chosen?.status?.tool_refusal ?? "";
  const options = [...(movesTool ? [["the tool", -1]] : []), ...joints.map((label, index) => [label, index])];
  const select = el("joint");
  el("joint-label").hidden = options.length < 2;
  if ([...select.options].map((option) => option.text).join() === options.map(([text]) => text).join()) return;
  select.replaceChildren(...options.map(([text, value]) => new Option(text, value)));
}

function stepJoint(by) {
  const { options, selectedIndex } = el("joint");
  if (options.length) el("joint").selectedIndex = (selectedIndex + by + options.length) % options.length;
}

function followControl() {
  const held = [...cards.values()].find((card) => card.mine && !card.robot.lost); // else a lost one would bar the others
  const now = held?.name ?? "";
  if (now && now !== driving) {
    hand.letGo();
    select(held);
    open(held);
  }
  driving = now;
  const robotMs = now === traces.robot ? traces.latencyMs : null;
  el("latency").textContent = now && link.fresh ? `latency: page ${pingMs.toFixed(0)} ms${robotMs === null ? "" : ` · robot ${robotMs.toFixed(0)} ms`}` : "";
  document.body.classList.toggle("driving", Boolean(now));
  el("operator").disabled = Boolean(now) || !link.fresh || signedIn;
  const idle = chosen?.heldMine ? "held: press a key to resume" : "take a robot over first";
  el("drive-hint").textContent = !link.fresh ? "no reply from the run" : now ? `you drive ${now}` : idle;
}

function give(robot, order) {
  const card = cards.get(robot);
  if (order === "e-stop") return stop([robot]);
  if (order === "cancel-stop") return cancelStop(robot);
  if (card.button(order).disabled) return;
  if (order === "take-over" && card.others) order = "request-control";
  if (order === "take-over" && driving && driving !== robot) return say(`${robot}: hand back ${driving} first`, false);
  if (order === "take-over") hand.setGripper(0); // it stays as another person or the policy left it
  const episode = LABELS.includes(order) ? card.status.episode : ""; // a late label does not end the next episode
  if (!link.send({ type: "order", robot, order, server_s: serverS, episode })) return say(`${robot}: ${order} not sent, no connection`, false);
  // The robot soon holds without input: do not wait for its reply.
  if (order === "take-over") granted = { robot, untilMs: performance.now() + GRANT_MS };
}

function stop(robots) {
  granted.robot = "";
  hand.letGo();
  stops.press(robots);
}

function cancelStop(robot) {
  stops.cancel(robot);
  say(`${robot}: e-stop cancelled before it was confirmed`, false);
}

function onStopped(robot, waitedMs) {
  cards.get(robot)?.stopped(STOPPED_MS);
  say(`${robot}: e-stop confirmed by its driver after ${waitedMs} ms`, true);
}

function showStops() {
  for (const card of cards.values()) card.showStop();
  showAlarm(link.fresh);
}

function onFreshKey(code) {
  if (!chosen || document.hidden) return;
  if (code === "KeyG" && chosen.mine) hand.toggleGripper();
  if (chosen.heldMine) give(chosen.name, "take-over");
}

function sendInput() {
  hand.pad.read(); // also while the page drives no robot: a stick resumes a hold
  const robot = driving || (performance.now() < granted.untilMs ? granted.robot : "");
  if (!robot || document.hidden || headset.isAway || !link.fresh) return;
  if (hand.rewinds) hand.setGripper(0); // the gripper stays as the path back leaves it
  const joint = Number(el("joint").value);
  link.send({ type: "drive", robot, move: hand.move(joint >= 0), gripper: hand.gripper, rewind: hand.rewinds, joint });
}

function showSpeed() {
  el("speed-value").textContent = `${el("speed").value}%`;
}

// In a text field each key types, also Space.
function typing(event) {
  return event.target.matches?.("input:not([type=range]), textarea");
}

function onKeyDown(event) {
  if (event.key === "Meta") hand.letGo(); // macOS reports no key that is released while Command is held
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event)) return;
  hand.slow = event.shiftKey;
  const index = Number(event.key) - 1;
  if (event.code === "Space") {
    if (!event.repeat) stopAll();
  } else if (hand.pressKey(event.code, event.repeat)) {
    // shown and sent by the next tick
  } else if (event.code === "KeyJ") {
    stepJoint(event.shiftKey ? -1 : 1);
  } else if (event.code in ORDER_KEYS) {
    if (!event.repeat && chosen) give(chosen.name, ORDER_KEYS[event.code]);
  } else if (event.code === "Escape") {
    open(null);
  } else if (index >= 0 && index < cards.size) {
    (opened ? openAlone : choose)(ordered()[index]);
  } else {
    return;
  }
  event.preventDefault();
}

function onKeyUp(event) {
  if (event.key === "Meta") hand.letGo();
  hand.slow = event.shiftKey;
  hand.releaseKey(event.code);
  if (event.code === "Space" && !typing(event)) event.preventDefault(); // else it clicks the button that has the focus
}

// A menu, a drag or an open list gets the release of a held key.
function onKeysTaken(event) {
  if (!event.defaultPrevented && (event.type !== "mousedown" || event.target.matches("select"))) hand.letGo();
}

function stopAll() {
  stop([...cards.keys()]);
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

function sendSeen() {
  if (seen.length) link.send({ type: "seen", pictures: seen.splice(0, MAX_SEEN) });
}

function seconds(ms) {
  return `${(ms / 1000).toFixed(1)} s`;
}

// The server releases the robots of a hidden page, as its timers are slow.
function onHidden() {
  if (document.hidden) hand.letGo();
  link.beat();
  look();
}

// Names the cameras that are shown: the robots send no others.
function look() {
  const fleet = el("robots").classList.contains("fleet");
  const large = cards.size ? ordered().filter(({ node }) => !fleet && !node.hidden).map(({ name }) => name) : null;
  link.send({ type: "look", on: !document.hidden, large, thumbnails: fleet });
}

fetch("/episodes").then(({ status }) => (el("episodes").hidden = status === 204)); // the console of a robot's computer has no store
el("stop-all").addEventListener("click", stopAll);
el("sign-out").addEventListener("click", async () => {
  await fetch("/sign-out", { method: "POST", body: "" });
  location.assign("/sign-in");
});
el("drive-hand-back").addEventListener("click", () => give(driving, "hand-back")); // a phone's panel covers the card's button
el("all-robots").addEventListener("click", () => open(null));
el("speed").addEventListener("input", showSpeed);
el("operator").addEventListener("focus", () => el("operator").select());
el("operator").addEventListener("change", () => {
  if (el("operator").checkValidity()) {
    sessionStorage.setItem("operator", el("operator").value);
    link.send({ type: "hello", operator: el("operator").value });
  }
  el("operator").blur();
});
window.addEventListener("keydown", onKeyDown, { capture: true });
window.addEventListener("keyup", onKeyUp, { capture: true });
window.addEventListener("blur", () => hand.letGo());
for (const start of ["contextmenu", "dragstart", "mousedown"]) window.addEventListener(start, onKeysTaken);
document.addEventListener("visibilitychange", onHidden);
showSpeed(); // it may be this browser's own setting
setInterval(sendInput, DRIVE_PERIOD_MS);
setInterval(sendSeen, SEEN_PERIOD_MS);
setInterval(showFreshness, LOOK_PERIOD_MS);
setInterval(() => cards.forEach((card) => card.showPictureAges()), LOOK_PERIOD_MS);
