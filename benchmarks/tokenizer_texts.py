"""Texts on which readers of the same vocabulary come apart, written for `benchmarks/tokenizers.py`."""

from __future__ import annotations

TEXTS: dict[str, str] = {
    "empty": "",
    "one space": " ",
    "spaces around": "  two before, three after   ",
    "runs of spaces": "a  b   c    d     e      f       g" + " " * 17 + "h" + " " * 64 + "i" + " " * 131 + "j",
    "tabs and lines": "x\ty\t\tz\n\n\nnext\r\nlast\r\r\n\n \n\t \n",
    "code": "def f(x):\n    if x<3 and x>=-1:\n        return {'a': [x[0]], \"b\": x**2}  # it's\n\n\n",
    "contractions": "I'm WE'LL they'd've o'clock 'tis it\u2019s DON'T 'S 's it'\u017f",
    "numbers": "0 1 12 123 1234 12345 1234567890 3.14159 1e-5 \u00bd \u2167 \u0663\u0664\u0665 \u3007",
    "signs": "!!! ??? ... --- *** ((((a)))) <<<>>> [[[x]]] {}{}{} //// \\\\ ~~~ ### @@@ $$ %% ^^ && ||",
    "control tokens": "</s><s> <|endoftext|> [MASK] [CLS] <pad><unk> <|begin_of_text|> [INST] <mask> </s",
    "byte tokens": "<0x41> <0x0A><0xFF> <0xZZ> <SPECIAL_20> <|reserved_token_1|>",
    "the space mark": "\u2581 a\u2581b \u2581\u2581c\u2581",
    "Chinese": (
        "\u4eba\u5de5\u667a\u80fd\u5728\u4e2d\u56fd\uff0c\u53d1\u5c55\u5f97\u5f88\u5feb\u3002abc\u4e2d\u6587d"
        "ef \u3000 \u7e41\u9ad4"
    ),
    "Japanese": (
        "\u5410\u8f29\u306f\u732b\u3067\u3042\u308b\u3002\u540d\u524d\u306f\u307e\u3060\u7121\u3044\u3002"
        "\u30ab\u30bf\u30ab\u30ca \uff76\uff9e \u30ac\u30d3"
    ),
    "Korean": (
        "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4. \u1112\u1161\u11ab\u1100\u1173\u11af \u314b\u314b\u314b"
    ),
    "Arabic and Hebrew": (
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629\u064f \u0645\u0650\u0646 \u05e2\u05b4\u05d1\u05b0\u05e8"
        "\u05b4\u05d9\u05ea \u200f(\u0628)\u200e"
    ),
    "Indic and Thai": (
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u200d\u0937 \u0ba4\u0bae\u0bbf\u0bb4\u0bcd \u0e44"
        "\u0e17\u0e22\u0e44\u0e21\u0e48\u0e21\u0e35\u0e27\u0e23\u0e23\u0e04"
    ),
    "Cyrillic and Greek": (
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u041c\u0418\u0420! \u0451\u0436\u0438\u043a \u0395\u03bb"
        "\u03bb\u03ac\u03c2 \u03a3\u03c2 \u0130\u0131"
    ),
    "emoji": (
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea\U0001f44d"
        "\U0001f3fd \u2764\ufe0f 1\ufe0f\u20e3"
    ),
    "combining marks": "e\u0301 a\u0323\u0302 o\u0302\u0323 x\u0301\u0327 \u00e9 \u1ed9 Z\u0351\u036b\u0343 \u212b",
    "compatibility": (
        "\ufb01ne \ufb03 \uff21\uff22\uff23 \uff11\uff12 \u2460 \u2122 \u00b2 \u01c4 \u337f \u1e9e \u2075"
        "\u2044\u2086 \u00a8a"
    ),
    "control characters": "a\x00b\x01c\x07d\x1b[0m\x7f\x85e\x9ff\u00adg",
    "odd spaces": "a\u00a0b\u2003c\u2009d\u200be\u202ff\u3000g\u2028h\u2029i\ufeffj\u1680k\u180el\u2060m",
    "rare points": "\ufffd\ufffe\U0010ffff\ue000 \U0001d54f\U0001d4d0 \U00020000 \u0378 \u1885",
    "a long word": "pneumonoultramicroscopicsilicovolcanoconiosis" * 7 + "\u00df" * 99 + "ab" * 200 + "a" * 333,
    "mixed": (
        "\tHTTPServer2Go\u2014na\u00efve caf\u00e9's \u201cquote\u201d... 50% of $1,234.56\u20ac @user #tag h"
        "ttp://x.y/?q=1&r=%20 \u00a9\n"
    ),
}
