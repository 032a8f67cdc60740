"""What a TCP connection may receive, enforced by the kernel: nothing of this process need run for it to hold.

A packet filter on the connection (classic BPF, which needs no permission) drops segments that begin at or beyond a
sequence number. Their sender keeps them and sends them again, less and less often, until the bound was raised.
"""

from __future__ import annotations

import ctypes
import errno
import socket
import struct

from user_sys.tunnel.tcp_state import GONE

SEGMENT_BYTES = 64 << 10
"""By so much a connection may exceed its quota: the segment that begins just before it."""
_TCP_SAVE_SYN, _TCP_SAVED_SYN = 27, 28  # linux/tcp.h, since Linux 4.3
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # asm-generic/socket.h
_SYN_BYTES = 256
_IPV6_HEADER_BYTES = 40
_INSTRUCTION = struct.Struct("HBBI")  # struct sock_filter, linux/filter.h: code, jump if true, if false, operand
_PROGRAM = struct.Struct("HP")  # struct sock_fprog: instructions, their address
_LOAD_BYTE, _LOAD_WORD, _LOAD_LENGTH, _TO_INDEX = 0x30, 0x20, 0x80, 0x07  # linux/bpf_common.h
_AND, _SHIFT_RIGHT, _SUBTRACT, _SUBTRACT_INDEX = 0x54, 0x74, 0x14, 0x1C
_IF_EQUAL, _IF_AT_LEAST, _RETURN = 0x15, 0x35, 0x06
_ALL, _NONE = 0xFFFFFFFF, 0
_SEQUENCE_AT, _HEADER_LENGTH_AT = 4, 12  # in the TCP header, where the filter's view of a segment begins


def keep_beginnings(listener: socket.socket) -> bool:
    """From now on `first_sequence` is known of connections to `listener`. False where the kernel cannot do that."""
    try:
        listener.setsockopt(socket.IPPROTO_TCP, _TCP_SAVE_SYN, 1)
    except OSError as error:
        if error.errno in GONE:
            return False
        raise
    return True


def first_sequence(connection: socket.socket) -> int | None:
    """The TCP sequence number of the first byte that `connection` receives.

    None where its beginning was not kept: its listener did not `keep_beginnings`, it was accepted by a SYN cookie, it
    was asked for already, or it is no TCP connection.
    """
    try:
        syn = connection.getsockopt(socket.IPPROTO_TCP, _TCP_SAVED_SYN, _SYN_BYTES)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise
    if not syn:
        return None
    header_bytes = 4 * (syn[0] & 0xF) if syn[0] >> 4 == 4 else _IPV6_HEADER_BYTES
    if len(syn) < header_bytes + 8:
        return None
    (number,) = struct.unpack_from(">I", syn, header_bytes + _SEQUENCE_AT)
    return (int(number) + 1) & _ALL


def hold_at(connection: socket.socket, sequence: int) -> bool:
    """From now on `connection` receives no bytes in segments that begin at `sequence` or beyond; replaces the former
    bound. False, and then no bound at all, where the kernel does not allow it or the connection is gone.
    """
    program = b"".join(
        _INSTRUCTION.pack(*instruction)
        for instruction in (
            (_LOAD_BYTE, 0, 0, _HEADER_LENGTH_AT),
            (_AND, 0, 0, 0xF0),
            (_SHIFT_RIGHT, 0, 0, 2),
            (_TO_INDEX, 0, 0, 0),
            (_LOAD_LENGTH, 0, 0, 0),
            (_SUBTRACT_INDEX, 0, 0, 0),
            (_IF_EQUAL, 3, 0, 0),  # acknowledgements and the end carry no bytes: they pass
            (_LOAD_WORD, 0, 0, _SEQUENCE_AT),
            (_SUBTRACT, 0, 0, sequence & _ALL),
            (_IF_AT_LEAST, 0, 1, 1 << 31),  # before it, in the arithmetic of sequence numbers (RFC 9293 §3.4)
            (_RETURN, 0, 0, _ALL),
            (_RETURN, 0, 0, _NONE),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    fprog = _PROGRAM.pack(len(program) // _INSTRUCTION.size, ctypes.addressof(code))
    if _set(connection, _SO_ATTACH_FILTER, fprog):
        return True
    _set(connection, _SO_DETACH_FILTER, bytes(4))
    return False


def _set(connection: socket.socket, option: int, operand: bytes) -> bool:
    try:
        connection.setsockopt(socket.SOL_SOCKET, option, operand)
    except OSError as error:
        if error.errno in (*GONE, errno.EPERM, errno.ENOMEM, errno.ENOENT):
            return False
        raise
    return True
