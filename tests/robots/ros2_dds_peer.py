"""An arm on another DDS implementation, without ROS: ``ros2_dds_peer.py DOMAIN``.

Eclipse Cyclone DDS uses the wire format of ROS 2: joint states, a force sensor and a stop button out, trajectories in.
It prints ``ready``, and a line of JSON for ``state``; other commands are ignored.
"""

# No postponed annotations here: cyclonedds evaluates the fields' types directly.
import json
import os
import select
import sys
import time
from dataclasses import dataclass, field

from cyclonedds.core import Policy, Qos
from cyclonedds.domain import Domain, DomainParticipant
from cyclonedds.idl import IdlStruct
from cyclonedds.idl.types import float64, int32, sequence, uint32
from cyclonedds.pub import DataWriter
from cyclonedds.sub import DataReader
from cyclonedds.topic import Topic
from cyclonedds.util import duration

JOINTS = ("shoulder", "elbow", "wrist")
IN_STATES = ("wrist", "shoulder", "elbow")
UPDATE_S = 0.01
HERE_ONLY = """<CycloneDDS><Domain><General><AllowMulticast>false</AllowMulticast>
<Interfaces><NetworkInterface name="lo"/></Interfaces></General>
<Discovery><ParticipantIndex>auto</ParticipantIndex><Peers><Peer address="127.0.0.1"/></Peers></Discovery>
</Domain></CycloneDDS>"""
RELIABLE = Policy.Reliability.Reliable(duration(seconds=1))


@dataclass
class Time(IdlStruct, typename="builtin_interfaces::msg::dds_::Time_"):
    sec: int32
    nanosec: uint32


@dataclass
class Duration(IdlStruct, typename="builtin_interfaces::msg::dds_::Duration_"):
    sec: int32
    nanosec: uint32


@dataclass
class Header(IdlStruct, typename="std_msgs::msg::dds_::Header_"):
    stamp: Time
    frame_id: str


@dataclass
class JointState(IdlStruct, typename="sensor_msgs::msg::dds_::JointState_"):
    header: Header
    name: sequence[str]
    position: sequence[float64]
    velocity: sequence[float64]
    effort: sequence[float64]


@dataclass
class Vector3(IdlStruct, typename="geometry_msgs::msg::dds_::Vector3_"):
    x: float64
    y: float64
    z: float64


@dataclass
class Wrench(IdlStruct, typename="geometry_msgs::msg::dds_::Wrench_"):
    force: Vector3
    torque: Vector3


@dataclass
class WrenchStamped(IdlStruct, typename="geometry_msgs::msg::dds_::WrenchStamped_"):
    header: Header
    wrench: Wrench


@dataclass
class Bool(IdlStruct, typename="std_msgs::msg::dds_::Bool_"):
    data: bool


@dataclass
class Point(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectoryPoint_"):
    positions: sequence[float64] = field(default_factory=list)
    velocities: sequence[float64] = field(default_factory=list)
    accelerations: sequence[float64] = field(default_factory=list)
    effort: sequence[float64] = field(default_factory=list)
    time_from_start: Duration = field(default_factory=lambda: Duration(0, 0))


@dataclass
class Trajectory(IdlStruct, typename="trajectory_msgs::msg::dds_::JointTrajectory_"):
    header: Header
    joint_names: sequence[str]
    points: sequence[Point]


class Arm:
    def __init__(self, domain: int) -> None:
        self.domain = Domain(domain, HERE_ONLY)
        here = DomainParticipant(domain)
        self.states = DataWriter(here, Topic(here, "rt/joint_states", JointState), qos=Qos(RELIABLE))
        self.forces = DataWriter(here, Topic(here, "rt/wrench", WrenchStamped), qos=Qos(Policy.Reliability.BestEffort))
        latched = Qos(RELIABLE, Policy.Durability.TransientLocal, Policy.History.KeepLast(1))
        self.button = DataWriter(here, Topic(here, "rt/stop_button", Bool, qos=latched), qos=latched)
        self.button.write(Bool(False))
        heard = Topic(here, "rt/arm_controller/joint_trajectory", Trajectory)
        self.commands = DataReader(here, heard, qos=Qos(RELIABLE, Policy.History.KeepLast(1)))
        self.place = dict.fromkeys(JOINTS, 0.0)
        self.heard = 0

    def update(self) -> None:
        for message in self.commands.take(N=10):
            if isinstance(message, Trajectory):
                self.heard += 1
                self.place.update(zip(message.joint_names, message.points[-1].positions, strict=True))
        seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
        header = Header(Time(seconds, nanoseconds), "hand")
        self.states.write(JointState(header, list(IN_STATES), [self.place[n] for n in IN_STATES], [0.0] * 3, []))
        self.forces.write(WrenchStamped(header, Wrench(Vector3(1.0, 2.0, 3.0), Vector3(0.0, 0.0, 0.0))))

    def run(self) -> None:
        """Run until standard input ends."""
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            self.update()
            if select.select([0], [], [], UPDATE_S)[0]:
                orders = os.read(0, 4096).decode()
                if not orders:
                    return
                for _ in range(orders.split().count("state")):
                    sys.stdout.write(json.dumps({"place": self.place, "heard": self.heard}) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    Arm(int(sys.argv[1])).run()
