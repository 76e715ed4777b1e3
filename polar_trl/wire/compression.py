"""Decompress a request body up to a size limit: a small body can unpack to gigabytes (a zip bomb).

Refuses content codings that no client of ours was seen to use (`WireError`; RFC 9110, section 8.4; zstd is RFC 8878).
"""

import io
import zlib

import zstandard

from polar_trl.errors import WireError

MAX_CODINGS = 2
MAX_MEMBERS = 16
"""Parts of a gzip body, each of which is unpacked from a copy of what follows it."""
_ZLIB_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


def decode_body(body: bytes, content_encoding: str, max_bytes: int) -> bytes:
    """Undo the body's content codings, given in the header's order. Raises `WireError` 400, 413 or 415."""
    codings = [coding.strip().lower() for coding in content_encoding.split(",", MAX_CODINGS)]
    codings = [coding for coding in codings if coding not in ("", "identity")]
    if len(codings) > MAX_CODINGS:
        raise WireError(f"content-encoding: at most {MAX_CODINGS} codings are read here", status=415)
    for coding in reversed(codings):
        if coding not in _ZLIB_BITS and coding != "zstd":
            raise WireError(f"content-encoding: {coding!r} is not read here; use gzip, deflate or zstd", status=415)
        try:
            body = _decode_zstd(body, max_bytes) if coding == "zstd" else _decode_zlib(body, coding, max_bytes)
        except (zlib.error, zstandard.ZstdError, EOFError) as error:
            raise WireError(f"content-encoding: the body is not valid {coding} ({error})") from error
        if len(body) > max_bytes:
            raise WireError(f"the body is larger than {max_bytes >> 20} MiB once it is unpacked", status=413)
    return body


def _decode_zlib(body: bytes, coding: str, max_bytes: int) -> bytes:
    unpacked = bytearray()
    num_members = 0
    while body and len(unpacked) <= max_bytes:  # gzip files may be several, one after the other
        num_members += 1
        if num_members > MAX_MEMBERS:
            raise EOFError(f"it has more than {MAX_MEMBERS} members")
        decoder = zlib.decompressobj(_ZLIB_BITS[coding])
        unpacked += decoder.decompress(body, max_bytes + 1 - len(unpacked))
        if not decoder.eof and len(unpacked) <= max_bytes:
            raise EOFError("it ends too early")
        body = decoder.unused_data
    return bytes(unpacked)


def _decode_zstd(body: bytes, max_bytes: int) -> bytes:
    # a frame may ask for a window of gigabytes; RFC 8878 has everybody read 8 MiB
    decompressor = zstandard.ZstdDecompressor(max_window_size=max(max_bytes, 8 << 20))
    with decompressor.stream_reader(io.BytesIO(body), read_across_frames=True) as reader:
        return reader.read(max_bytes + 1)
