"""Whether exchange and gradient run at once on CPUs: each alone, and both by one thread and by two.

    sudo python -m benchmarks.overlap [--rate 100mbit] [--json FILE]

Two hosts of benchmarks.slow_network take an overlapped step of CocktailSGD with 8 bits apart.
"""

import argparse
import pathlib
import statistics
import tempfile

from benchmarks import commands, network, rows, slow_network
from jaxcomp.launch.exits import clean_exits

HOSTS, MODEL = 2, "14M"


def measure(rate: str, repeats: int) -> dict:
    """Builds the step on the hosts, and times its parts over links of a rate."""
    update = slow_network.METHODS["CocktailSGD, 8 bits"]
    build = {"update": update, "model": slow_network.MODELS[MODEL], "sequences": 2, "overlap": True}
    (team,) = slow_network.teams(["CocktailSGD, 8 bits"], None)
    with network.network(HOSTS) as net, tempfile.TemporaryDirectory() as folder:
        environment = slow_network.ENVIRONMENT | {"JAX_COMPILATION_CACHE_DIR": folder}
        hosts = slow_network.programs(team, net.hosts)
        with commands.start(hosts, environment, pathlib.Path(folder)) as workers:
            read = {"model": build["model"], "sequences": build["sequences"]}
            commands.call(workers, "read", slow_network.SECONDS, **read)
            facts = commands.call(workers[:1], "build", slow_network.SECONDS, **build)[0]
            commands.call(workers[1:], "build", slow_network.SECONDS, **build)
            network.shape(net, rate)
            answers = commands.call(workers, "parts", slow_network.SECONDS, repeats=repeats)
    seconds = {name: statistics.fmean(one[name] for one in answers) for name in answers[0]}
    return {"update": update, "rate": rate, "hosts": HOSTS, "seconds": seconds, **facts}


def main() -> None:
    """Measures, and prints what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rate", default="100mbit", help="as 500mbit, or unlimited")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=pathlib.Path, help="file for the row")
    options = parser.parse_args()
    if (reason := network.unavailable()) is not None:
        raise ValueError(reason)
    row = measure(options.rate, options.repeats)
    for name, seconds in row["seconds"].items():
        print(f"{name}: {1e3 * seconds:.0f} ms")
    if options.json:
        rows.write(options.json, [row])


if __name__ == "__main__":
    with clean_exits():
        main()
