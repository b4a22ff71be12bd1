"""The cast, places and plots that stories are put together from; knows no wording of requests."""

HEROES: tuple[str, ...] = tuple(
    (
        "fox rabbit bear mouse owl cat dog hedgehog squirrel frog turtle duck goose sparrow crow "
        "badger otter beaver deer wolf lion tiger elephant giraffe zebra monkey parrot penguin "
        "whale dolphin crab snail bee butterfly ladybug spider horse pony donkey goat sheep pig "
        "hen rooster dragon unicorn giant wizard knight princess prince king queen pirate sailor "
        "fisherman farmer baker gardener tailor painter robot astronaut teacher shepherd girl boy "
        "miller carpenter witch fairy dwarf kitten puppy lamb camel kangaroo panda swan raven "
        "musician inventor clockmaker"
    ).split()
)
NAMES: tuple[str, ...] = tuple(
    (
        "Pip Luna Oliver Mira Toby Hazel Bruno Nell Felix Wren Otis Ruby Jasper Ivy Milo Clara "
        "Finn Poppy Hugo Daisy Rufus Elsa Barnaby Willow Casper Tilda Leo Maya Oscar Juniper"
    ).split()
)
# No name is in both lists, so that a hero never meets a namesake.
FRIEND_NAMES: tuple[str, ...] = tuple(
    (
        "Max Stella Theo Freya Gus Nora Arlo Zara Ned Olive Benny Greta Sunny Lotte Rory Pearl "
        "Wally Trixie Monty Flora Basil Sage Ziggy"
    ).split()
)
OBJECTS: tuple[str, ...] = tuple(
    (
        "lantern bell key map boat kite drum flute hat scarf blanket basket book mirror compass "
        "clock coin ring crown cup spoon ladder lamp umbrella wagon whistle pebble shell feather "
        "rose apple pumpkin button ribbon ball puppet violin telescope candle teapot"
    ).split()
)
TRAITS: tuple[str, ...] = (
    "small", "brave", "kind", "curious", "clever", "gentle", "cheerful", "shy", "young", "quiet",
    "proud", "lively", "patient", "friendly", "lonely", "merry",
)  # fmt: skip
PLACES: tuple[str, ...] = (
    "at the edge of a green forest", "in a village by the sea", "on a hill above the river",
    "beside a silver lake", "in a valley full of flowers", "near an old stone bridge",
    "in a little house under an oak tree", "at the foot of a snowy mountain",
    "on an island far away", "in a garden behind a tall wall", "next to a windmill",
    "in a town with crooked roofs", "by a quiet pond", "at the end of a long road",
    "in a tower made of stone", "in a warm and sunny meadow",
)  # fmt: skip
# One list for each place in a plot, so that no story names the same spot twice.
SPOTS: tuple[str, ...] = (
    "behind the old barn", "in the tall grass", "beside the well", "near the garden gate",
    "next to the road",
)  # fmt: skip
SECOND_SPOTS: tuple[str, ...] = (
    "beneath the bridge", "along the river", "behind the mill", "on top of the wall",
)  # fmt: skip
THIRD_SPOTS: tuple[str, ...] = (
    "inside a hollow tree", "between the roots of an oak", "under a pile of leaves",
    "behind a big stone",
)  # fmt: skip
FRIENDS: tuple[str, ...] = (
    "finch", "mole", "weasel", "parakeet", "hamster", "salamander", "blackbird", "hare", "lynx",
    "nightingale", "stork", "blacksmith", "gnome", "traveler", "cook", "hunter", "ferryman",
)  # fmt: skip
HABITS: tuple[str, ...] = (
    "went for a walk before breakfast", "watched the sun come up", "sang to the birds",
    "swept the path in front of the door", "counted the clouds in the sky",
    "gathered berries for the winter", "said good morning to the trees",
    "listened to the wind", "waved to everyone who passed by", "looked for new paths to follow",
)  # fmt: skip
OPENINGS: tuple[str, ...] = (
    "Once upon a time, there was {a_trait} {hero} named {name} who lived {place}.",
    "Long ago, {a_trait} {hero} named {name} lived {place}.",
    "There once was {a_trait} {hero} named {name} who lived {place}.",
    "Many years ago, {a_trait} {hero} named {name} had a home {place}.",
)
ENDINGS: tuple[str, ...] = (
    "That evening, {name} and {friend} sat together and watched the stars.",
    "From that day on, {name} and {friend} were the best of friends.",
    "When the moon came up, {name} went home happy and slept very well.",
    "After that, everybody {place} loved to hear this story.",
    "And every year, {name} and {friend} remembered that day with a smile.",
)

# Each plot is a list of steps, each step a choice of sentences, and the moral that fits it.
PLOTS: tuple[tuple[tuple[tuple[str, ...], ...], str], ...] = (
    (
        (
            (
                "{name} owned {an_object} and loved it more than anything else.",
                "The best thing {name} had was {an_object}, a present from an old aunt.",
            ),
            (
                "One windy morning, the {object} was gone.",
                "One day, {name} woke up and could not find the {object}.",
            ),
            (
                "{name} looked {spot} and {spot2}, but there was nothing.",
                "{name} searched {spot}, and then {spot2}, but the {object} was not there.",
            ),
            (
                'Then {a_friend} named {friend} came by. "Why are you so sad?" asked {friend}.',
                'Just then, {a_friend} named {friend} stopped and asked, "What is the matter?"',
            ),
            (
                '"I have lost my {object}," said {name}. "Then we will look for it together," '
                "said {friend}.",
                '"My {object} is lost," answered {name}. "Two can see more than one," said '
                '{friend}. "Let me help you."',
            ),
            (
                "They searched all day long, and at last {friend} saw something {spot3}.",
                "They asked everyone they met, and before sunset they looked {spot3}.",
            ),
            (
                "It was the {object}! {name} laughed with joy and thanked {friend} again and "
                "again.",
                "There lay the {object}, safe and sound. {name} danced around {friend} with "
                "happiness.",
            ),
        ),
        "With a friend at your side, every search is easier.",
    ),
    (
        (
            (
                "One morning, {name} found {an_object} {spot}.",
                "One day, while walking home, {name} saw {an_object} lying {spot}.",
            ),
            (
                "It was the most beautiful {object} in the world, and {name} wanted to keep it.",
                "The {object} shone in the sun, and {name} had never seen anything so fine.",
            ),
            (
                "But soon {name} heard somebody crying {spot2}.",
                "But on the way, {name} met somebody who was looking everywhere {spot2}.",
            ),
            (
                'It was {a_friend} named {friend}. "I have lost my {object}," said {friend}, '
                '"and I do not know what to do."',
                'It was {a_friend} named {friend}. "Have you seen my {object}?" asked {friend}. '
                '"My grandmother gave it to me."',
            ),
            (
                "{name} thought for a long time. Nobody would ever know.",
                "For a moment, {name} wanted to say no and run away.",
            ),
            (
                'Then {name} held out the {object} and said, "Here it is. It belongs to you."',
                'Then {name} took a deep breath and said, "I found it {spot}. Please take it '
                'back."',
            ),
            (
                "{friend} was so happy that they shared a big cake that very afternoon.",
                "{friend} smiled from ear to ear and invited {name} to supper.",
            ),
        ),
        "An honest heart is worth more than any treasure.",
    ),
    (
        (
            (
                "{name} was afraid of the dark and never went out at night.",
                "Everybody knew that {name} was afraid of the night.",
            ),
            (
                "One evening, a great storm came, and the wind blew all the lights out.",
                "One night, thunder shook the windows and the rain fell like a river.",
            ),
            (
                "Far away, {name} heard a voice. It was {a_friend} named {friend}, calling for "
                "help.",
                'Then {name} heard a call. "Help me!" cried {friend}, who was {a_friend} from '
                "next door.",
            ),
            (
                "{name} was shaking, but took {an_object} and opened the door.",
                "With a beating heart, {name} picked up {an_object} and stepped outside.",
            ),
            (
                "Step by step, {name} walked through the rain, past the place {spot}, and held "
                "the {object} tight.",
                "The night was black, but the {object} gave {name} courage with every step.",
            ),
            (
                "At last {name} found {friend} {spot2}, wet and cold but not hurt.",
                "There was {friend}, stuck {spot2} and unable to move.",
            ),
            (
                "Together they walked home, and the dark did not look so dark any more.",
                "Hand in hand they came back, and {name} noticed that the fear had gone.",
            ),
        ),
        "To be brave is to be afraid and to go on all the same.",
    ),
    (
        (
            (
                "One summer, a great fair was held, and the prize was a golden {object}.",
                "One spring, the whole country spoke of a race, and the prize was {an_object}.",
            ),
            (
                '"I will win," said {a_friend} named {friend}, who was very fast and a little '
                "proud.",
                '"Nobody can beat me," laughed {friend}, {a_friend} with long legs.',
            ),
            (
                "{name} said nothing and practiced every single day.",
                "{name} only smiled and trained a little every morning.",
            ),
            (
                "On the big day, {friend} ran ahead and then lay down to rest {spot}.",
                "When the race began, {friend} was soon far in front and stopped to play {spot}.",
            ),
            (
                "{name} kept going, slowly and steadily, past the people {spot2}.",
                "{name} walked on and on without a pause, even {spot2}.",
            ),
            (
                "When {friend} woke up, {name} had already reached the end and held the {object}.",
                "Before {friend} noticed it, {name} had crossed the line and won the {object}.",
            ),
            (
                '"You have earned it," said {friend}, and they shook hands.',
                '"Next time I will not rest," said {friend}, and both of them laughed.',
            ),
        ),
        "Small steps that never stop go a long way.",
    ),
    (
        (
            (
                "One winter, the snow was so deep that food became hard to find.",
                "One year, the harvest was poor and everybody was hungry.",
            ),
            (
                "{name} had only a little bread left and {an_object} to keep it in.",
                "{name} had nothing but a piece of cheese and {an_object}.",
            ),
            (
                "One night, there was a knock at the door. It was {a_friend} named {friend}.",
                "One evening, {a_friend} named {friend} came to the door, cold and tired.",
            ),
            (
                '"I have not eaten for days," said {friend} in a soft voice.',
                '"May I come in and warm my feet?" asked {friend}.',
            ),
            (
                '"Come in," said {name}, and gave {friend} half of everything.',
                '{name} did not think twice. "What is mine is yours," said {name}.',
            ),
            (
                "In the morning, {friend} was gone, but the {object} was full of food.",
                "When the sun came up, the {object} was filled to the top with nuts and honey.",
            ),
            (
                "However much {name} took out of the {object}, it never became empty.",
                "There was enough for everybody, and nobody was hungry again that year.",
            ),
        ),
        "What you share comes back to you in the end.",
    ),
    (
        (
            (
                "{name} dreamed of seeing the other side of the great river.",
                "{name} wanted to know what was on the other side of the river.",
            ),
            (
                "But the water was deep, and there was no bridge for miles.",
                "But the river was wide and wild, and nobody had ever crossed it.",
            ),
            (
                "One day, {name} had an idea and began to build a raft, with {an_object} on top.",
                "So {name} collected wood {spot} and tied it together, and put {an_object} on it.",
            ),
            (
                'The first raft sank at once. "You will never do it," said the people {spot2}.',
                "The first raft broke into pieces, and so did the second one.",
            ),
            (
                "Only {friend}, who was {a_friend}, said, \"Try again. I will hold the rope.\"",
                'Then {a_friend} named {friend} came and said, "Let us try it once more."',
            ),
            (
                "They worked for a week, and the next raft was strong and light.",
                "They tried this knot and that knot until the raft was as strong as a ship.",
            ),
            (
                "And so {name} and {friend} crossed the river, and the {object} shone at the front "
                "of the raft.",
                "On a sunny day they reached the other side, and {name} held up the {object} and "
                "cheered.",
            ),
        ),
        "If you fail, learn from it and try again.",
    ),
)  # fmt: skip
