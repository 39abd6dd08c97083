"""Read the event files of TensorBoard."""

from __future__ import annotations

import struct


def events_in(path):
    """Yield the events of a file: each has its length and two checksums around it."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    data = path.read_bytes()
    while data:
        (length,), (check,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        assert check == masked_crc32c(data[:8])
        content, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4])[0] == masked_crc32c(content)
        data = data[4:]
        yield Event.FromString(content)


def curves(folder):
    """Return the steps and values by tag that TensorBoard would show."""
    points_by_tag = {}
    for path in sorted(folder.iterdir()):
        assert "tfevents" in path.name
        for event in events_in(path):
            if event.session_log.status == 1:  # START: discard what comes again
                points_by_tag = {
                    tag: [point for point in points if point[0] < event.step] for tag, points in points_by_tag.items()
                }
            for value in event.summary.value:
                points_by_tag.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points_by_tag
