"""Reverb, a table in this process, read through its dataset in batches: ``ROWS CAMERAS``.

Frames are stored once and shared by the transitions before and after them, as Reverb's writer does it.
"""

import numpy as np
import reverb
import tensorflow as tf

from benchmarks.peers.rounds import ACTIONS, BATCH, FLOATS, SIDE, arguments, frames, rate, serve

FLUSH_STEPS = 50


def main() -> None:
    rows, cameras = map(int, arguments())
    signature = {f"image{camera}": tf.TensorSpec((2, SIDE, SIDE, 3), tf.uint8) for camera in range(cameras)}
    signature |= {"state": tf.TensorSpec((2, FLOATS), tf.float32), "action": tf.TensorSpec((2, ACTIONS), tf.float32)}
    table = reverb.Table(
        "steps",
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=rows,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature=signature,
    )
    server = reverb.Server([table])
    address = f"localhost:{server.port}"
    pictures = frames(256)
    with reverb.Client(address).trajectory_writer(num_keep_alive_refs=2) as writer:
        for row in range(rows + 1):
            images = {f"image{camera}": pictures[(row + camera) % len(pictures)] for camera in range(cameras)}
            writer.append({**images, "state": np.zeros(FLOATS, np.float32), "action": np.zeros(ACTIONS, np.float32)})
            if row:
                trajectory = {name: column[-2:] for name, column in writer.history.items()}
                writer.create_item("steps", 1.0, trajectory)
            if row % FLUSH_STEPS == 0:
                writer.flush()
    dataset = reverb.TrajectoryDataset.from_table_signature(
        address, "steps", max_in_flight_samples_per_worker=2 * BATCH
    )
    batches = iter(dataset.batch(BATCH).prefetch(2))
    serve(lambda: rate(lambda: next(batches)))


if __name__ == "__main__":
    main()
