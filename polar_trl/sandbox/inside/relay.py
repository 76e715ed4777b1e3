"""Relay connections from a loopback address inside a container to a unix socket that was mounted into it.

Run as a script: `python3 -I -S relay.py HOST PORT SOCKET READY MAX_LIFE_S`. READY is written once it listens; after
MAX_LIFE_S it ends. Standard library of Python 3.7 only: it runs on the image's Python. `relay.js` is the same for
images without Python.
"""

import asyncio
import signal
import sys


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            block = await reader.read(1 << 16)
            if not block:
                break
            writer.write(block)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.transport.abort()


async def main(host: str, port: int, path: str, ready: str) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(path)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))
        far_writer.close()
        writer.close()

    server = await asyncio.start_server(relay, host, port, backlog=128)
    open(ready, "w").close()
    await server.serve_forever()


if __name__ == "__main__":
    signal.alarm(int(sys.argv[5]))
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]))
