// Input: pressed keys and touch buttons, as shares along x, y, z, and a gripper state that stays.

const MOVES = {
  KeyW: [1, 0, 0],
  KeyS: [-1, 0, 0],
  KeyA: [0, 1, 0],
  KeyD: [0, -1, 0],
  KeyR: [0, 0, 1],
  KeyF: [0, 0, -1],
};
const SLOW = 0.3;

export class Hand {
  // `moved(code)` is called when a key or button is pressed, `changed()` also when one is released.
  constructor(moved, changed) {
    this.moved = moved;
    this.changed = changed;
    this.down = new Set();
    this.slow = false;
    this.gripper = 0;
    this.buttons = new Map();
    for (const button of document.querySelectorAll("#pad [data-code]")) this.wire(button);
  }

  wire(button) {
    const code = button.dataset.code;
    this.buttons.set(code, button);
    button.addEventListener("pointerdown", (event) => {
      event.preventDefault(); // no focus, no text selection, no long-press menu
      button.setPointerCapture(event.pointerId);
      this.press(code);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      button.addEventListener(end, () => this.release(code));
    }
    button.addEventListener("contextmenu", (event) => event.preventDefault());
  }

  // Whether `code` is a key of the page.
  press(code) {
    if (!this.buttons.has(code)) return false;
    if (this.down.has(code)) return true;
    this.down.add(code);
    this.buttons.get(code).classList.add("lit");
    this.moved(code);
    this.changed();
    return true;
  }

  release(code) {
    if (!this.down.delete(code)) return;
    this.buttons.get(code).classList.remove("lit");
    this.changed();
  }

  letGo() {
    for (const code of [...this.down]) this.release(code);
    this.slow = false;
  }

  // Unknown becomes closed, then open and closed in turn.
  toggleGripper() {
    this.setGripper(this.gripper === -1 ? 1 : -1);
  }

  setGripper(gripper) {
    this.gripper = gripper;
    document.getElementById("grip").textContent = { "-1": "gripper closed", 0: "gripper", 1: "gripper open" }[gripper];
  }

  move(speed) {
    const scale = speed * (this.slow ? SLOW : 1);
    const total = [0, 0, 0];
    for (const code of this.down) (MOVES[code] ?? total.map(() => 0)).forEach((share, i) => (total[i] += share));
    return total.map((share) => Math.max(-1, Math.min(1, share)) * scale);
  }
}
