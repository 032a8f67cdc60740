"""A simulated bus of Feetech STS3215 servos on a pseudo-terminal: ``feetech_bus.py LINK COUNT``; LINK becomes the
serial port.

It implements the maker's protocol 0 (ping, read, write, sync read, sync write) and simulates the servos' motion. It
shares no code with the client. Commands on standard input: ``state`` (prints a line of JSON: registers by motor),
``leaps`` (likewise: the distance to the goal when each motor's torque came on), ``unplug``, ``poke ID ADDRESS
BYTE...``, ``lose COUNT``: that many packets get no response, and ``mute ID``: that motor responds to none.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import time
import tty
from pathlib import Path

MODEL = (0x09, 0x03)  # 777, little-endian
PING, READ, WRITE, SYNC_READ, SYNC_WRITE = 0x01, 0x02, 0x03, 0x82, 0x83
BROADCAST = 0xFE
STEPS_PER_S = 2000.0
LOW, HIGH, MODE, TORQUE, GOAL, PRESENT = 9, 11, 33, 40, 42, 56  # register addresses; mode and torque have one byte


class Servo:
    def __init__(self, number: int) -> None:
        self.registers = bytearray(90)
        self.registers[0:6] = bytes([3, 10, 0, *MODEL, number])
        for address, value in ((LOW, 1024), (HIGH, 3072), (GOAL, 2048), (PRESENT, 2048)):
            self.put(address, value)
        self.position = 2048.0
        self.leap = 0.0  # the farthest goal at the time when torque came on

    def write(self, address: int, values: bytes) -> None:
        limp = not self.registers[TORQUE]
        self.registers[address : address + len(values)] = values
        if limp and self.registers[TORQUE]:
            self.leap = max(self.leap, abs(self.word(GOAL) - self.position))

    def word(self, address: int) -> int:
        return int.from_bytes(self.registers[address : address + 2], "little")

    def put(self, address: int, value: int) -> None:
        self.registers[address : address + 2] = value.to_bytes(2, "little")

    def move(self, seconds: float) -> None:
        if self.registers[TORQUE] and not self.registers[MODE]:  # not a wheel
            goal = min(max(self.word(GOAL), self.word(LOW)), self.word(HIGH))
            step = STEPS_PER_S * seconds
            self.position += min(max(goal - self.position, -step), step)
        self.put(PRESENT, round(self.position))


class Bus:
    def __init__(self, count: int) -> None:
        self.servos = {number: Servo(number) for number in range(1, count + 1)}
        self.mute = 0
        self.received = bytearray()
        self.moved_s = time.monotonic()
        self.to_lose = 0

    def take(self, arrived: bytes) -> bytes:
        """The responses to all complete packets."""
        self.received += arrived
        now_s = time.monotonic()
        for servo in self.servos.values():
            servo.move(now_s - self.moved_s)
        self.moved_s = now_s
        answers = b""
        while (packet := self.next_packet()) is not None:
            answer = self.answer(packet)
            if answer and self.to_lose:
                self.to_lose -= 1
            else:
                answers += answer
        return answers

    def next_packet(self) -> bytes | None:
        start = self.received.find(b"\xff\xff")
        if start < 0 or len(self.received) < start + 4:
            return None
        end = start + 4 + self.received[start + 3]
        if len(self.received) < end:
            return None
        packet = bytes(self.received[start + 2 : end])
        del self.received[:end]
        return packet if ~sum(packet[:-1]) & 0xFF == packet[-1] else None

    def answer(self, packet: bytes) -> bytes:
        number, instruction, body = packet[0], packet[2], packet[3:-1]
        if instruction == SYNC_READ:
            return b"".join(self.status(each, body[0], body[1]) for each in body[2:])
        if instruction == SYNC_WRITE:
            address, size = body[:2]
            for at in range(2, len(body), size + 1):
                self.servos[body[at]].write(address, body[at + 1 : at + 1 + size])
            return b""
        if instruction == WRITE and number in self.servos:
            self.servos[number].write(body[0], body[1:])
            return self.status(number, 0, 0)
        if instruction == READ:
            return self.status(number, body[0], body[1])
        return self.status(number, 0, 0) if instruction == PING else b""

    def status(self, number: int, address: int, size: int) -> bytes:
        if number not in self.servos or number == self.mute:
            return b""
        inner = bytes([number, size + 2, 0, *self.servos[number].registers[address : address + size]])
        return b"\xff\xff" + inner + bytes([~sum(inner) & 0xFF])


def main(link: Path, count: int) -> None:
    if hasattr(os, "sched_setscheduler"):  # servos answer at once, however busy the computer is
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    bus = Bus(count)
    master, slave = os.openpty()
    tty.setraw(slave)
    link.symlink_to(os.ttyname(slave))
    os.close(slave)
    keep = os.open(link, os.O_RDWR | os.O_NOCTTY)  # a pseudo-terminal without a client cannot be read
    inbox = open(0, "rb", buffering=0, closefd=False)  # select does not report buffered bytes
    print("ready", flush=True)
    while True:
        readable, _, _ = select.select([master, inbox], [], [])
        if master in readable:
            os.write(master, bus.take(os.read(master, 4096)))
        if inbox in readable:
            order = inbox.readline().split()
            if not order:
                return
            if order[0] == b"state":
                bus.take(b"")
                print(json.dumps({n: list(servo.registers) for n, servo in bus.servos.items()}), flush=True)
            elif order[0] == b"leaps":
                print(json.dumps([servo.leap for servo in bus.servos.values()]), flush=True)
            elif order[0] == b"poke":
                at = int(order[2])
                servo = bus.servos[int(order[1])]
                servo.registers[at : at + len(order) - 3] = bytes(map(int, order[3:]))
                servo.position = servo.word(PRESENT)  # it can be turned by hand
            elif order[0] == b"lose":
                bus.to_lose = int(order[1])
            elif order[0] == b"mute":
                bus.mute = int(order[1])
            elif order[0] == b"unplug":
                link.unlink()
                os.close(keep)
                os.close(master)
                return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
