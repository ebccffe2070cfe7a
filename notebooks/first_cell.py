import importlib.metadata
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tomllib
import urllib.request

repository = ""  # as https://github.com/OWNER/jaxcomp


def find_checkout():
    """The folder above this one, the archive in it, the repository's, or one that you upload."""
    here = pathlib.Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "train" / "loop.py").exists():
            return folder
    archives = [str(file) for kind in ("tar.gz", "zip") for file in here.glob(f"jaxcomp*.{kind}")]
    if not archives and repository:
        archives = [urllib.request.urlretrieve(f"{repository}/archive/main.zip", "jaxcomp.zip")[0]]
    elif not archives:
        from google.colab import files

        archives = list(files.upload())
    shutil.unpack_archive(archives[0], "checkout")
    found = pathlib.Path("checkout").rglob("pyproject.toml")
    return min(found, key=lambda path: len(path.parts)).parent.resolve()


if importlib.util.find_spec("train") is None:  # else you have a checkout, and what it needs
    folder = find_checkout()
    sys.path.insert(0, str(folder))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["train"]]
    if shutil.which("nvidia-smi"):
        needed += ["jax[cuda12]"]
    subprocess.check_call([sys.executable, "-m", "pip", "install", "-q", *needed])
    for package in ("jax", "jaxlib", "flax", "optax", "numpy"):
        print(package, importlib.metadata.version(package))
