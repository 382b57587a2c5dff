"""A model folder as an HTTP service: one process, one event loop, one thread that decodes, one model.

limits.py          `Limits`: the most that a server accepts
service.py         `Service`: a model folder without HTTP; `open_service` picks its kind
answers.py         responses and errors as HTTP: server-sent events, the status of an error
gate.py            what is in front of the routes: keys, bodies, the access log, clients that leave
translate.py       fastformer's own routes of a translator; libretranslate.py has LibreTranslate's
html_text.py       the texts of an HTML page
openai*.py         OpenAI's routes: completions, chats and speech; embeddings.py and rerank.py have those of encoders
structured.py      the fields of requests that constrain an answer
tools.py           the tools of a request, and the calls in its answer
tei.py, tgi.py     the routes of Hugging Face's servers, for encoders and for language models
*_service.py       the services of encoders and of speech
app.py             `make_app`: the routes of the service's kind, health, errors in each format's shape
"""

from fastformer.serving.app import make_app as make_app
from fastformer.serving.limits import Limits as Limits
from fastformer.serving.service import Service as Service
from fastformer.serving.service import open_service as open_service
