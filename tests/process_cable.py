"""Passes bytes on between addresses: `process_cable.py PORT:PORT ...`.

What comes to the first port goes to the second one and back. While this process
is stopped by a signal, nothing passes, and no connection is closed: to those
who are connected, a cable is cut.
"""

import asyncio
import sys


async def pass_on(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def joined(target, reader, writer):
    try:
        far_reader, far_writer = await asyncio.open_connection(
            "localhost", target
        )
    except OSError:
        writer.close()
        return
    await asyncio.gather(
        pass_on(reader, far_writer), pass_on(far_reader, writer)
    )


async def main():
    for pair in sys.argv[1:]:
        port, target = map(int, pair.split(":"))
        await asyncio.start_server(
            lambda *ends, to=target: joined(to, *ends), "localhost", port
        )
    print("ready", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
