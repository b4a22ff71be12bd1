"""Everyday English words, and made-up ones, to fill sentences with; knows no skill."""

from random import Random

NOUNS = (
    "apple anchor arrow atlas autumn bakery ball banana basket beach bell bicycle bird blanket "
    "boat book bottle bowl box bread bridge brother bucket bus butter button cake camera candle "
    "car carpet castle cat chair cheese cherry child circle city clock cloud coat coffee coin "
    "computer corner cousin cup curtain dance daughter desk dinner doctor dog door dragon dream "
    "dress drum engine evening eye factory farm farmer father feather field film finger fire fish "
    "flag floor flower football forest fork friend fruit game garden gate giant glass glove grass "
    "guitar hammer hand harbor hat heart hill holiday honey horse hospital hotel house island "
    "jacket jar journey juice key king kitchen knife ladder lake lamp language leaf lemon letter "
    "library light line lion machine magnet map market meadow milk mirror money monkey moon "
    "morning mother mountain mouse museum music needle neighbor nest newspaper night nose notebook "
    "ocean office onion orange orchestra oven page paint palace paper park party pencil pepper "
    "piano picture pillow pilot pirate plane planet plate pocket poem pony potato prince printer "
    "puzzle queen question rabbit radio rain rainbow restaurant rice ring river road robot rocket "
    "roof room rope rose salad salt sand school science sea season secret sentence shadow sheep "
    "ship shirt shoe shop sister sky snow soap sock soldier song soup spoon spring square stamp "
    "star station stone storm story street sugar summer sun supper table tail tea teacher "
    "telephone tent theater ticket tiger toast tomato tooth towel tower town toy train tree "
    "tunnel umbrella uncle valley violin voice wagon wall watch water wave weather wheel whisper "
    "wind window winter wizard wolf wood word world yard zebra"
).split()
VERBS = (
    "answer bake borrow break bring build buy call carry catch choose clean climb close cook count "
    "cut dance draw drink drive eat enjoy explain fill find fix fly follow forget give grow hear "
    "help hide hold invite jump keep kick know learn leave lift like listen look lose love make "
    "measure meet mix move need open paint play plant pull push read remember ride ring run see "
    "sell send share show sing sit sleep smell speak stand start stop study swim take teach tell "
    "think throw touch travel try turn use visit wait walk want wash watch wear win wish work write"
).split()
ADJECTIVES = (
    "angry bad beautiful big black blue brave bright broken brown busy calm careful cheap clean "
    "clear clever cold cool curious dark deep different dry early easy empty fair famous fast fine "
    "free fresh friendly full funny gentle golden good gray great green happy hard healthy heavy "
    "high hot hungry important kind large late lazy light little lonely long loud low lucky modern "
    "narrow new nice noisy old open orange perfect pink plain polite poor proud purple quick quiet "
    "ready red rich round sad safe sharp short shy silent silver simple slow small smart soft sour "
    "strange strong sweet tall thick thin tiny tired ugly warm weak wet white wide wild wise "
    "yellow young"
).split()
ADVERBS = (
    "again already always carefully early easily gently happily here home late loudly never now "
    "often outside quickly quietly sadly slowly sometimes soon there today together tomorrow "
    "tonight twice yesterday"
).split()
NAMES = (
    "Ada Amir Anna Ben Bruno Carla Cleo Daniel Dora Elif Emma Finn Flora Grace Hana Hugo Ida Ivan "
    "Jane Jonas Kai Lara Leo Lina Luca Maria Max Mia Milo Nadia Nina Noah Olga Omar Otto Pablo "
    "Paul Petra Rosa Sam Sara Sofia Tara Theo Tom Uma Vera Victor Yuki Zoe"
).split()
SYMBOLS = (
    "é",
    "ü",
    "ñ",
    "ç",
    "ø",
    "ß",
    "→",
    "€",
    "☕",
    "🙂",
    "🚀",
    "🌙",
    "日本",
    "你好",
    "мир",
    "ελ",
)

_ONSETS = "b br bl c ch cl d dr f fl g gr h j k l m n p pl qu r s sh st t tr v w z".split()
_VOWELS = "a e i o u ai ea ee oo ou".split()
_CODAS = ("", "", "b", "ck", "d", "g", "l", "ll", "m", "n", "nd", "p", "r", "rt", "s", "t", "x")


def made_up(rng: Random) -> str:
    """Make up a word that could be English but most likely is not."""
    syllables = rng.choice((1, 2, 2, 3))
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables)
    )


def any_word(rng: Random) -> str:
    """Draw a word of any kind, one in six of them made up."""
    roll = rng.random()
    if roll < 0.16:
        return made_up(rng)
    kinds = (NOUNS, NOUNS, VERBS, ADJECTIVES, ADVERBS, NAMES)
    return rng.choice(rng.choice(kinds))
