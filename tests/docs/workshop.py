"""Makes the folder in which the documentation's examples run: small models and texts under the pages' names.

A page says `from_pretrained("bert-base-uncased")`; here that is a folder beside it with random weights, so that nothing
is downloaded.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

FROZEN = Path(__file__).parents[1] / "frozen"


@functools.cache
def _made() -> Path:
    """Returns a folder that is made once per process, and which `workshop` copies."""
    from tests.audio import speech
    from tests.audio.test_reading import wav
    from tests.checkpoints import decoders, families, multilingual
    from tests.encoding import folders
    from tests.foreign.ctranslate2_folders import ARGOS
    from tests.serving import models as serving

    made = Path(tempfile.mkdtemp(prefix="fastformer-docs-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    for name, labels in (("bert-base-uncased", None), ("all-MiniLM-L6-v2", None), ("ms-marco-MiniLM-L6-v2", 1)):
        (made / name).mkdir()
        folders.bert(made / name, num_labels=labels)
    serving.multi_vector(made / "colbertv2.0")
    families.marian(made / "opus-mt-en-de")
    families.bart(made / "bart-base")
    families.t5(made / "t5-small")
    multilingual.nllb(made / "nllb-200")
    speech.folder(made / "whisper-base")
    for seed, name in enumerate(("speech.wav", "talk.wav")):
        (made / name).write_bytes(wav(speech.sound(3, seed)))
    decoders.llama3(made / "llama")
    decoders.gpt2(made / "gpt2")
    shutil.copytree(FROZEN / "run", made / "numbers")
    with tempfile.TemporaryDirectory(prefix="fastformer-docs-") as parent:
        package = Path(shutil.copytree(ARGOS, Path(parent) / "translate-en_de"))
        archive = shutil.make_archive(str(made / "package"), "zip", package.parent, package.name)
    Path(archive).rename(made / "translate-en_de-1_0.argosmodel")
    pairs = [line.split("\t") for line in (FROZEN / "pairs.tsv").read_text(encoding="utf-8").splitlines()]
    for name, some in (("train", pairs), ("val", pairs[:20]), ("test", pairs[:7])):
        for side, ending in enumerate(("en", "de")):
            (made / f"{name}.{ending}").write_text("".join(f"{pair[side]}\n" for pair in some), encoding="utf-8")
    (made / "train.tsv").write_text("".join("\t".join(pair) + "\n" for pair in pairs), encoding="utf-8")
    (made / "book.txt").write_text("To be, or not to be, that is the question.\n" * 200, encoding="utf-8")
    (made / "passages.txt").write_text("A bird sings over the hills.\nThe river is slow.\n", encoding="utf-8")
    return made


def workshop(folder: Path) -> Path:
    """Returns a separate folder for a page."""
    return Path(shutil.copytree(_made(), folder / "workshop"))
