// A gamepad of this computer: the sticks move, A toggles the gripper, B held rewinds, the shoulders select a joint.

const DEAD_ZONE = 0.15; // share of a stick's range that counts as rest
const BUTTONS = { a: 0, b: 1, left: 4, right: 5 };

export class Pad {
  // `shares` are forward, left and up: of the stick that moves, and of the other one's vertical axis.
  // `toggled()` is called when A is pressed, `moved()` when a stick leaves its rest, `stepped(by)` when a shoulder is pressed.
  // `swapped()`: the right stick moves, and the left one lifts.
  constructor(toggled, moved, stepped, swapped) {
    this.moved = moved;
    this.swapped = swapped;
    this.presses = { a: toggled, left: () => stepped(-1), right: () => stepped(1) };
    this.down = new Set();
    this.rewinds = this.active = false;
    this.shares = [0, 0, 0];
    for (const event of ["gamepadconnected", "gamepaddisconnected"]) window.addEventListener(event, () => this.show());
  }

  get device() {
    return [...navigator.getGamepads()].find((pad) => pad?.connected);
  }

  show() {
    document.getElementById("gamepad").textContent = this.device ? `gamepad: ${this.device.id}` : "";
  }

  // Call it often: a press is seen from one call to the next.
  read() {
    const pad = this.device;
    if (!pad) {
      this.rewinds = this.active = false;
      this.shares = [0, 0, 0];
      return;
    }
    for (const [name, act] of Object.entries(this.presses)) {
      const down = Boolean(pad.buttons[BUTTONS[name]]?.pressed);
      if (down && !this.down.has(name)) act();
      this.down[down ? "add" : "delete"](name);
    }
    const rewound = this.rewinds;
    this.rewinds = Boolean(pad.buttons[BUTTONS.b]?.pressed);
    const [x, y, height] = this.swapped() ? [2, 3, 1] : [0, 1, 3];
    this.shares = [pad.axes[y], pad.axes[x], pad.axes[height]].map((axis) => rest(-(axis ?? 0)));
    const active = this.rewinds || this.shares.some(Boolean);
    if (active && !(this.active || rewound)) this.moved();
    this.active = active;
  }
}

function rest(share) {
  const beyond = Math.max(0, Math.abs(share) - DEAD_ZONE) / (1 - DEAD_ZONE);
  return Math.sign(share) * Math.min(1, beyond);
}
