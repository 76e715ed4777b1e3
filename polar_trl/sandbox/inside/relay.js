// See relay.py: the same for Node.js. `node relay.js HOST PORT SOCKET READY MAX_LIFE_S`
const fs = require("fs");
const net = require("net");

const [host, port, path, ready, maxLifeS] = process.argv.slice(2);

function relay(near) {
  const far = net.connect({ path, allowHalfOpen: true });
  near.pipe(far);
  far.pipe(near);
  near.on("error", () => far.destroy());
  far.on("error", () => near.resetAndDestroy ? near.resetAndDestroy() : near.destroy());
}

net
  .createServer({ allowHalfOpen: true }, relay)
  .listen({ host, port: Number(port), backlog: 128 }, () => fs.writeFileSync(ready, ""));
setTimeout(() => process.exit(0), Math.min(Number(maxLifeS) * 1000, 2 ** 31 - 1));
