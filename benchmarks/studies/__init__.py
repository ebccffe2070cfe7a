"""Studies: one question each, answered once, with the program that repeats it.

Modules are programs, such as `python -m benchmarks.studies.agreement`; rows are in
benchmarks/results, those of a program that is gone, too: `overlap.json` times an exchange and a
gradient, each alone and both by one thread and by two.

- `agreement`: does an accelerator compute what a CPU computes, for every code and method?
- `before_after`: are codes and steps of this checkout as fast as those of another?
- `evaluation`: what may a run evaluate on its way, where replicas differ?
- `fine_tune`: what does fine-tuning of existing models need, in memory, bytes and seconds?
- `fine_tune_network`: which method reaches dense Adam's loss first, in seconds over slow links?
- `islands`: what do faults of an island or of the store cost the others?
- `islands_cost`: what do islands cost in step time, bytes and loss, beside local steps?
- `planner`: how far are the planner's predictions from measured steps?
- `precision`: what do narrow parameters and states cost in loss?
- `restarts`: what does a lost process cost, in steps and seconds?
- `scaling`: what do large-batch methods send and hold on up to 1,024 devices?
- `whole_run`: how long do whole runs take over slow links, with their dense steps?
"""
