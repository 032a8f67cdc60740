"""The UR5e's kinematics for the simulated controller, by the maker's Denavit-Hartenberg parameters."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

A = (0.0, -0.425, -0.3922, 0.0, 0.0, 0.0)
D = (0.1625, 0.0, 0.0, 0.1333, 0.0997, 0.0996)
ALPHA = (np.pi / 2, 0.0, 0.0, np.pi / 2, -np.pi / 2, 0.0)

Array = NDArray[np.float64]


def _frames(q: list[float]) -> list[Array]:
    frame, found = np.eye(4), []
    for angle, a, d, alpha in zip(q, A, D, ALPHA, strict=True):
        c, s, ca, sa = np.cos(angle), np.sin(angle), np.cos(alpha), np.sin(alpha)
        found.append(frame)
        frame = frame @ np.array(
            [[c, -s * ca, s * sa, a * c], [s, c * ca, -c * sa, a * s], [0, sa, ca, d], [0, 0, 0, 1]]
        )
    return [*found, frame]


def _rotation_vector(matrix: Array) -> Array:
    angle = np.arccos(np.clip((np.trace(matrix) - 1) / 2, -1, 1))
    if angle < 1e-9:
        return np.zeros(3)
    axis = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]])
    if np.pi - angle < 1e-4:  # the rotation keeps its axis
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        found = vectors[:, np.argmax(values)]
        return angle * found * (np.sign(found @ axis) or 1.0)
    return axis / np.linalg.norm(axis) * angle


def _rotation(vector: Array) -> Array:
    angle = float(np.linalg.norm(vector))
    if angle < 1e-12:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    return np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross


def forward(q: list[float]) -> list[float]:
    """The flange's pose: x, y, z and rotation vector."""
    flange = _frames(q)[-1]
    return [*flange[:3, 3].tolist(), *_rotation_vector(flange[:3, :3]).tolist()]


def inverse(pose: list[float], near: list[float]) -> list[float]:
    """The joint angles near `near` that reach `pose`, by damped least squares."""
    q, wanted = np.array(near), _rotation(np.array(pose[3:]))
    for _ in range(20):
        frames = _frames(q.tolist())
        flange = frames[-1]
        error = np.concatenate([np.array(pose[:3]) - flange[:3, 3], _rotation_vector(wanted @ flange[:3, :3].T)])
        if np.abs(error).max() < 1e-7:
            break
        axes = np.array([f[:3, 2] for f in frames[:6]])
        arms = np.array([flange[:3, 3] - f[:3, 3] for f in frames[:6]])
        jacobian = np.vstack([np.cross(axes, arms).T, axes.T])
        q = q + jacobian.T @ np.linalg.solve(jacobian @ jacobian.T + 1e-6 * np.eye(6), error)
    found: list[float] = q.tolist()
    return found
