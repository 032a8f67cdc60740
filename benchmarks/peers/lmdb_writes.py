"""LMDB, each transaction synced: ``FOLDER RECORD_BYTES RECORDS GROUP``; answers in MB/s."""

import os
import shutil
import tempfile
import time

import lmdb

from benchmarks.peers.rounds import arguments, serve


def main() -> None:
    folder, *numbers = arguments()
    size, records, group = map(int, numbers)
    payloads = [os.urandom(size) for _ in range(records)]

    def measure() -> float:
        path = tempfile.mkdtemp(dir=folder)
        with lmdb.open(path, map_size=4 * size * records + (64 << 20)) as environment:
            start = time.perf_counter()
            for first in range(0, records, group):
                with environment.begin(write=True) as transaction:
                    for number in range(first, min(first + group, records)):
                        transaction.put(number.to_bytes(8, "big"), payloads[number], append=True)
            elapsed = time.perf_counter() - start
        shutil.rmtree(path)
        return size * records / 1e6 / elapsed

    serve(measure)


if __name__ == "__main__":
    main()
