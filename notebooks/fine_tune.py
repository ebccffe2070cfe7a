# %% [markdown]
# # Fine-tune a Hugging Face model over a slow network
#
# Four replicas start from a Hugging Face folder, learn another text with CocktailSGD, and
# write a folder that transformers loads. Dense Adam, for comparison, sends a hundred times more.
# A few minutes on a CPU.

# %%
import pathlib
import sysconfig
import tempfile

import jax
import matplotlib.pyplot as plt
import tokenizers

from train.config import Config, Data, Optimizer
from train.export import export
from train.generate import generated
from train.huggingface.pretrained import Pretrained
from train.loop import run
from train.models.decoder import DecoderConfig
from train.output import plots
from train.placement import devices

steps = 300
jax.config.update("jax_platforms", "cpu")  # one GPU is one device; the CPU can be four
devices.start(replicas=4)  # before anything runs
plt.rcParams.update(plots.STYLE)

# %% [markdown]
# ## A folder
#
# Any folder of GPT-2, OPT, GPT-J, GPT-NeoX, Pythia, Llama, Mistral or Qwen will do. With a network,
# `hf download EleutherAI/pythia-14m --local-dir pythia-14m` brings a small one. Write its name:

# %%
folder = ""

# %% [markdown]
# Without one, this cell makes a folder: a tokenizer of 1,024 tokens, and a model in Pythia's form
# that learns the source of Python's standard library.

# %%
if not folder:
    made = tempfile.mkdtemp()
    folder, words = f"{made}/small", f"{made}/words"
    library = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train(list(map(str, library)), vocab_size=1024, show_progress=False)
    pathlib.Path(words).mkdir()
    tokenizer.save(f"{words}/tokenizer.json")
    small = Config(
        name="small",
        runs_dir=f"{made}/before",
        steps=2 * steps,
        optimizer=Optimizer(
            update="chain(compressed_mean(quantize(4), axis_name), adam(learning_rate))",
            learning_rate=6e-3,
            warmup_steps=steps // 10,
        ),
        model=DecoderConfig(
            layers=2,
            width=64,
            heads=4,
            context=64,
            vocab=1024,
            norm_eps=1e-5,
            activation="gelu_exact",
            residual="parallel",
            rotary="halves",
            tied=False,
        ),
        data=Data(tokenizer=words),
        eval_every=steps,
        checkpoint_every=2 * steps,
    )
    before = run(small)
    export(pathlib.Path(small.runs_dir, small.name), pathlib.Path(folder), "float32", None)
print(sorted(file.name for file in pathlib.Path(folder).iterdir()))

# %% [markdown]
# ## Fine-tune it
#
# The new text is C: the headers of this machine's Python. `start_from` names the folder, and
# `Pretrained` takes the model's form from it. Only `update` differs between the two runs.

# %%
updates = {
    "dense Adam": "chain(compressed_mean(identity(), axis_name), adam(learning_rate))",
    "CocktailSGD": "cocktail_sgd(adam(learning_rate), axis_name)",
}
runs, runs_dir = {}, tempfile.mkdtemp()  # another folder each time this cell runs
for name, update in updates.items():
    config = Config(
        name=name,
        runs_dir=runs_dir,
        steps=steps,
        start_from=folder,
        optimizer=Optimizer(update=update, learning_rate=2e-3, warmup_steps=steps // 10),
        model=Pretrained(context=64, dtype="float32", remat=False),
        data=Data(path=sysconfig.get_path("include")),
        eval_every=max(1, steps // 10),
        checkpoint_every=steps,
    )
    runs[name] = [row for row in run(config) if "val_loss" in row]

# %% [markdown]
# ## Loss against what was sent

# %%
figure, panels = plt.subplots(1, 2, sharey=True, figsize=(7.6, 3.4))
for name, rows in runs.items():
    number, sent, loss = plots.curve(name, rows)
    panels[0].plot(number, loss, label=name)
    panels[1].plot([x / 1e6 for x in sent[1:]], loss[1:], label=name)
    print(f"{name}: {loss[-1]:.2f} nats per token, {sent[-1] / 1e6:,.1f} MB sent by a replica")
panels[0].set(xlabel="steps", ylabel="validation loss on C\n(nats per token)")
panels[1].set(xscale="log", xlabel="MB sent by a replica")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# ## Take it elsewhere
#
# The weights are the mean over the replicas. `transformers.AutoModelForCausalLM.from_pretrained`
# loads the new folder. The likeliest text before and after, from a model of this size:

# %%
tuned = tempfile.mkdtemp()  # an empty folder, also if this cell runs again
export(pathlib.Path(runs_dir, "CocktailSGD"), pathlib.Path(tuned), "float32", None)
for path in (folder, tuned):
    print(repr(generated(pathlib.Path(path), ["static int"], 12)[0]))
