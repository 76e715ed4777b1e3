"""Compressed request bodies."""

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard

from polar_trl.errors import WireError
from polar_trl.wire.compression import decode_body

BODY = b'{"a": "' + b"x" * 5000 + b'"}'
CODERS = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("coding", CODERS)
def test_a_body_comes_back_whole(coding: str) -> None:
    assert decode_body(CODERS[coding](BODY), coding, 1 << 20) == BODY
    assert decode_body(CODERS[coding](BODY), coding.upper(), len(BODY)) == BODY


def test_gzip_may_come_in_several_members() -> None:
    assert decode_body(gzip.compress(BODY[:7]) + gzip.compress(BODY[7:]), "gzip", 1 << 20) == BODY


def test_codings_are_undone_from_the_last() -> None:
    assert decode_body(zlib.compress(gzip.compress(BODY)), "gzip, deflate", 1 << 20) == BODY
    assert decode_body(BODY, "identity", 1 << 20) == BODY


@pytest.mark.parametrize("coding", CODERS)
def test_a_bomb_is_refused_before_it_is_unpacked(coding: str) -> None:
    with pytest.raises(WireError, match="larger than") as caught:
        decode_body(CODERS[coding](bytes(64 << 20)), coding, 1 << 20)
    assert caught.value.status == 413


@pytest.mark.parametrize("coding", CODERS)
@pytest.mark.parametrize("damage", [lambda body: b"no" + body, lambda body: BODY])
def test_a_damaged_body_is_the_clients_fault(coding: str, damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(WireError, match="content-encoding: the body is not valid") as caught:
        decode_body(damage(CODERS[coding](BODY)), coding, 1 << 20)
    assert caught.value.status == 400


@pytest.mark.parametrize("coding", ["gzip", "deflate"])  # of zstd the beginning is read, and is no whole JSON
def test_a_body_that_ends_too_early_is_refused(coding: str) -> None:
    with pytest.raises(WireError, match="it ends too early"):
        decode_body(CODERS[coding](BODY)[:-9], coding, 1 << 20)


def test_an_unknown_coding_is_named() -> None:
    with pytest.raises(WireError, match="'br' is not read here") as caught:
        decode_body(BODY, "br", 1 << 20)
    assert caught.value.status == 415


def test_members_codings_and_windows_are_bounded() -> None:
    with pytest.raises(WireError, match="more than 16 members"):
        decode_body(gzip.compress(b"") * 1_000_000, "gzip", 1 << 20)
    with pytest.raises(WireError, match="at most 2 codings") as caught:
        decode_body(BODY, ", ".join(["gzip"] * 300), 1 << 20)
    assert caught.value.status == 415
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj().compress(BODY * 100_000)
    with pytest.raises(WireError, match="not valid zstd"):
        decode_body(frame, "zstd", 16 << 20)
