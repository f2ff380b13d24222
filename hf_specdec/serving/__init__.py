"""An OpenAI-compatible server that speculates, on the FastAPI stack of ``transformers serve``.

transformers gives the application, its routes, and the conversion of messages and tool calls. Ours
are what happens to a request's rows: a queue, batches that share verification, statistics.

Needs the extra: ``pip install hf-specdec[serving]``.
"""

from hf_specdec import seams

seams.check(seams.SERVING)
