"""The languages of a multilingual translator: their names, and the tokens that tell the model the languages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

# The places of the languages' tokens:
# "front"   source: [source] text EOS    translation: [target] text EOS    NLLB, M2M100, mBART-50
# "behind"  source: text EOS [source]    translation: [target] text EOS    the first NLLB
# "start"   as "behind", but a translation begins with [target] in place of the start token    mBART
# "asked"   source: [target] text EOS    translation: text EOS             MADLAD, Marian
Places: TypeAlias = Literal["front", "behind", "start", "asked"]

_NEAR = 3  # the most names that an error suggests
_SHOWN = 8  # the most names that it lists if no name is similar

# ISO 639-1's codes with NLLB's names; for a language with several scripts or varieties, the most usual one.
_ISO_NAMES = (
    "af:afr_Latn am:amh_Ethi ar:arb_Arab as:asm_Beng ay:ayr_Latn az:azj_Latn ba:bak_Cyrl be:bel_Cyrl bg:bul_Cyrl "
    "bm:bam_Latn bn:ben_Beng bo:bod_Tibt bs:bos_Latn ca:cat_Latn cs:ces_Latn cy:cym_Latn da:dan_Latn de:deu_Latn "
    "dz:dzo_Tibt ee:ewe_Latn el:ell_Grek en:eng_Latn eo:epo_Latn es:spa_Latn et:est_Latn eu:eus_Latn fa:pes_Arab "
    "fi:fin_Latn fj:fij_Latn fo:fao_Latn fr:fra_Latn ga:gle_Latn gd:gla_Latn gl:glg_Latn gn:grn_Latn gu:guj_Gujr "
    "ha:hau_Latn he:heb_Hebr hi:hin_Deva hr:hrv_Latn ht:hat_Latn hu:hun_Latn hy:hye_Armn id:ind_Latn ig:ibo_Latn "
    "is:isl_Latn it:ita_Latn ja:jpn_Jpan jv:jav_Latn ka:kat_Geor ki:kik_Latn kk:kaz_Cyrl km:khm_Khmr kn:kan_Knda "
    "ko:kor_Hang ky:kir_Cyrl lb:ltz_Latn lg:lug_Latn li:lim_Latn ln:lin_Latn lo:lao_Laoo lt:lit_Latn lv:lvs_Latn "
    "mg:plt_Latn mi:mri_Latn mk:mkd_Cyrl ml:mal_Mlym mn:khk_Cyrl mr:mar_Deva ms:zsm_Latn mt:mlt_Latn my:mya_Mymr "
    "nb:nob_Latn ne:npi_Deva nl:nld_Latn nn:nno_Latn no:nob_Latn ny:nya_Latn oc:oci_Latn or:ory_Orya pa:pan_Guru "
    "pl:pol_Latn ps:pbt_Arab pt:por_Latn qu:quy_Latn rn:run_Latn ro:ron_Latn ru:rus_Cyrl rw:kin_Latn sa:san_Deva "
    "sc:srd_Latn sd:snd_Arab sg:sag_Latn si:sin_Sinh sk:slk_Latn sl:slv_Latn sm:smo_Latn sn:sna_Latn so:som_Latn "
    "sq:als_Latn sr:srp_Cyrl ss:ssw_Latn st:sot_Latn su:sun_Latn sv:swe_Latn sw:swh_Latn ta:tam_Taml te:tel_Telu "
    "tg:tgk_Cyrl th:tha_Thai ti:tir_Ethi tk:tuk_Latn tl:tgl_Latn tn:tsn_Latn tr:tur_Latn ts:tso_Latn tt:tat_Cyrl "
    "ug:uig_Arab uk:ukr_Cyrl ur:urd_Arab uz:uzn_Latn vi:vie_Latn wo:wol_Latn xh:xho_Latn yi:ydd_Hebr yo:yor_Latn "
    "zh:zho_Hans zu:zul_Latn"
)
_ISO = dict(pair.split(":") for pair in _ISO_NAMES.split())


class LanguageIds(NamedTuple):
    """The ids that tell a model the languages of one text.

    Attributes:
        front, behind: the ids before the source's text, and those after its EOS.
        begin: the ids that the translation begins with.
    """

    front: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()


@dataclass(frozen=True)
class Languages:
    """The languages of a model.

    Args:
        ids: the id of each language's token, by its name.
        places: the places of the tokens; see `Places`.
        lead: the ids in front of the target's token for the places "asked".
        source, target: the default languages of a text; None: the caller has to name one. A model whose start token is
            the target has no other target.

    Raises:
        ValueError: there are no languages, the places are unknown, or a default is not one of the languages.
    """

    ids: Mapping[str, int]
    places: Places
    lead: tuple[int, ...] = ()
    source: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if not self.ids or self.places not in get_args(Places):
            raise ValueError(
                f"expected languages and their places in {get_args(Places)}, got {len(self.ids)} languages and "
                f"{self.places!r}"
            )
        for name in (self.source, self.target):
            if name is not None and not (isinstance(name, str) and name in self.ids):
                raise ValueError(f"expected one of the {len(self.ids)} languages of the tokenizer, got {name!r}")

    def find(self, name: str, argument: str = "a language") -> str:
        """Finds a language by its own name, in any case, or by a short one, such as "de" for "deu_Latn".

        Args:
            name: the name.
            argument: the name's description in an error.

        Raises:
            ValueError: no language has the name, or several have; the nearest names are suggested.
        """
        if not isinstance(name, str):
            raise ValueError(
                f"expected {argument} to be the name of a language, got {type(name).__name__} {name!r:.40}"
            )
        if name in self.ids:
            return name
        by_lower = {language.lower(): language for language in self.ids}
        query = name.strip().replace("-", "_").lower()
        if query in by_lower:
            return by_lower[query]
        if _ISO.get(query) in self.ids:
            return _ISO[query]
        begun = [language for short, language in by_lower.items() if short.startswith(f"{query}_")]
        if len(begun) == 1:
            return begun[0]
        near = begun or [by_lower[match] for match in difflib.get_close_matches(query, by_lower, n=_NEAR)]
        if near:
            hint = f"did you mean {' or '.join(map(repr, near))}?"
        else:
            names = sorted(self.ids)
            hint = f"there are {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"
        raise ValueError(
            f"expected {argument} to be one of the model's {len(self.ids)} languages, got {name!r}; {hint}"
        )

    def check(self, source: str | None, target: str | None) -> None:
        """Checks names of languages before there is a text; see `of`.

        Raises:
            ValueError: a language is unknown, or the model allows no choice of it.
        """
        if self.places == "asked" and source is not None:
            raise ValueError(
                f"expected no source_lang, got {source!r}: this model detects the source language, and is only "
                "told the target"
            )
        for argument, name in (("source_lang", source), ("target_lang", target)):
            if name is not None:
                self.find(name, argument)

    def of(self, source: str | None, target: str | None) -> LanguageIds:
        """Returns the ids that tell the model the languages of a text.

        Args:
            source, target: names of languages; None: the defaults.

        Raises:
            ValueError: a language is unknown or missing, or the model allows no choice of it.
        """
        if self.places == "asked":
            self.check(source, None)
            target = self.target if target is None else self.find(target, "target_lang")
            return LanguageIds() if target is None else LanguageIds(front=(*self.lead, self.ids[target]))
        source_id = self._named("source_lang", source, self.source)
        target_id = self._named("target_lang", target, self.target)
        if self.places == "front":
            return LanguageIds(front=(source_id,), begin=(target_id,))
        if self.places == "behind":
            return LanguageIds(behind=(source_id,), begin=(target_id,))
        if self.target is not None and target_id != self.ids[self.target]:
            raise ValueError(f"expected target_lang {self.target!r}, with which this model begins, got {target!r}")
        return LanguageIds(behind=(source_id,))

    def _named(self, argument: str, name: str | None, default: str | None) -> int:
        name = default if name is None else self.find(name, argument)
        if name is None:
            names = sorted(self.ids)
            raise ValueError(
                f"expected {argument}, one of the model's {len(names)} languages, such as {names[0]!r}, got none"
            )
        return self.ids[name]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Languages:
        """Restores the languages from the result of `to_dict`.

        Raises:
            ValueError, TypeError, KeyError: the values are not a result of `to_dict`.
        """
        ids = {str(name): int(i) for name, i in values["ids"].items()}
        return cls(ids, values["places"], tuple(map(int, values["lead"])), values["source"], values["target"])
