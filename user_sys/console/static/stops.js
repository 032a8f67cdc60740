// The e-stops of this page. Each is repeated until the robot's driver confirms it or the operator cancels it, on a
// separate connection, also after a reconnection and a reload.

import { Link } from "./link.js";

const REPEAT_MS = 100;
const UNCONFIRMED_MS = 1000; // without a confirmation for so long the page warns
const PING_MS = 500;
const RETRY_MS = 500; // a stop that was pressed while the network was away follows it at once
const KEPT = "stops";

const nowMs = () => Math.round(performance.timeOrigin + performance.now()); // epoch; not set back while the page is open

export class Stops {
  // `operator()` returns the operator's name; `confirmed(robot, ms)` and `changed()` are callbacks.
  constructor(operator, confirmed, changed) {
    this.operator = operator;
    this.confirmed = confirmed;
    this.changed = changed;
    this.pressed = new Map(JSON.parse(sessionStorage.getItem(KEPT) ?? "[]")); // robot -> press, atMs (epoch), reason
    for (const press of this.pressed.values()) press.atMs = Math.min(press.atMs, nowMs()); // the clock was set back
    const on = { open: () => this.repeat(), stopped: (message) => this.answer(message) };
    this.link = new Link("/stop", PING_MS, on, RETRY_MS);
    setInterval(() => this.repeat(), REPEAT_MS);
  }

  press(robots) {
    for (const robot of robots) {
      const press = Date.now() * 1000 + Math.floor(1000 * Math.random()); // unlike that of any other page
      this.pressed.set(robot, { atMs: nowMs(), reason: "", ...this.pressed.get(robot), press });
    }
    this.repeat();
    this.keep();
  }

  cancel(robot) {
    this.pressed.delete(robot);
    this.keep();
  }

  // Milliseconds since the press; undefined without an unconfirmed one.
  waitedMs(robot) {
    return this.pressed.has(robot) ? nowMs() - this.pressed.get(robot).atMs : undefined;
  }

  isUnconfirmed(robot) {
    return this.waitedMs(robot) > UNCONFIRMED_MS;
  }

  // A sentence about unconfirmed stops; empty if there are none.
  get unconfirmedText() {
    const robots = [...this.pressed.keys()].filter((robot) => this.isUnconfirmed(robot));
    const describe = (robot) => (this.pressed.get(robot).reason ? `${robot} (${this.pressed.get(robot).reason})` : robot);
    return robots.length ? `The stop is NOT CONFIRMED: ${robots.map(describe).join(", ")}. It is repeated until it is.` : "";
  }

  repeat() {
    if (!this.pressed.size) return;
    const presses = Object.fromEntries([...this.pressed].map(([robot, { press }]) => [robot, press]));
    this.link.send({ type: "stop", operator: this.operator() || "guest", presses });
    this.changed();
  }

  answer({ robot, press, confirmed, reason }) {
    const waiting = this.pressed.get(robot);
    if (waiting?.press !== press) return;
    waiting.reason = reason;
    if (!confirmed) return this.changed();
    const waitedMs = this.waitedMs(robot);
    this.cancel(robot);
    this.confirmed(robot, waitedMs);
  }

  keep() {
    sessionStorage.setItem(KEPT, JSON.stringify([...this.pressed]));
    this.changed();
  }
}
