"""Everyday requests to a chat model, put together from templates: what a drafter is trained on.

``everyday_prompts(n)`` gives n different ones. They are no data set worth the name; they only lead
the target through the kinds of text that people ask for, and the target writes the rest.
"""

import json
import random

# fmt: off
# What is asked about.
TOPICS = [
    "a bicycle", "coffee", "the moon", "volcanoes", "honey bees", "the water cycle",
    "solar panels", "electric cars", "cats", "dogs", "elephants", "penguins", "whales",
    "dinosaurs", "rain forests", "the ocean", "deserts", "mountains", "rivers", "gravity",
    "magnets", "electricity", "light", "sound", "atoms", "DNA", "the heart", "the brain",
    "sleep", "exercise", "healthy eating", "vitamins", "stress", "meditation", "yoga", "running",
    "swimming", "football", "basketball", "chess", "music", "jazz", "the guitar", "the piano",
    "painting", "photography", "film making", "theatre", "dance", "poetry", "novels",
    "libraries", "museums", "castles", "pyramids", "the Roman Empire", "ancient Greece",
    "the Middle Ages", "the Renaissance", "the Industrial Revolution", "democracy", "elections",
    "taxes", "banks", "budgeting", "saving money", "investing", "inflation", "insurance",
    "starting a business", "marketing", "job interviews", "resumes", "teamwork", "leadership",
    "time management", "public speaking", "email", "social media", "the internet", "computers",
    "programming", "Python", "databases", "artificial intelligence", "machine learning",
    "robots", "smartphones", "video games", "cyber security", "passwords", "cloud computing",
    "space travel", "Mars", "black holes", "stars", "the sun", "climate change", "recycling",
    "gardening", "trees", "flowers", "farming", "cooking", "bread", "pasta", "soup", "salads",
    "chocolate", "cheese", "tea", "wine", "pizza", "breakfast", "camping", "hiking", "fishing",
    "travel", "airplanes", "trains", "ships", "bridges", "houses", "furniture", "clothes",
    "shoes", "fashion", "birthday parties", "weddings", "friendship", "family", "parenting",
    "school", "homework", "mathematics", "fractions", "geometry", "statistics", "physics",
    "chemistry", "biology", "geography", "history", "languages", "English grammar", "Spanish",
    "French", "translation", "writing", "journalism", "newspapers", "advertising", "law",
    "hospitals", "doctors", "vaccines", "allergies", "headaches", "the immune system", "teeth",
    "eyes", "hair", "weather", "storms", "snow", "winter", "summer", "spring", "autumn",
    "holidays", "New York", "Paris", "London", "Tokyo", "India", "Africa", "Australia", "Canada",
    "Brazil", "Japan", "China", "Italy", "Egypt", "the Arctic", "the Amazon", "the Alps",
    "islands", "lakes", "waterfalls", "caves", "glaciers", "earthquakes", "tornadoes", "tides",
    "rainbows", "clouds", "thunder", "fog", "the seasons", "the sunset", "the stars at night",
    "comets", "satellites", "telescopes", "microscopes", "batteries", "engines", "rockets",
    "bicycles and scooters", "trams", "traffic", "roads", "lighthouses", "harbours", "elevators",
    "refrigerators", "washing machines", "air conditioning", "heating", "clocks", "calendars",
    "maps", "compasses", "glass", "paper", "plastic", "steel", "gold", "diamonds", "salt",
    "sugar", "water", "oxygen", "carbon dioxide", "acids", "crystals", "fossils", "bacteria",
    "viruses", "fungi", "seeds", "roots", "leaves", "evolution", "genes", "cells", "blood",
    "bones", "muscles", "the lungs", "the skin", "hormones", "memory", "dreams", "emotions",
    "happiness", "fear", "anger", "kindness", "honesty", "courage", "patience", "creativity",
    "curiosity", "motivation", "habits", "goals", "failure", "success", "feedback", "conflict",
    "negotiation", "remote work", "meetings", "deadlines", "interns", "retirement", "pensions",
    "mortgages", "rent", "credit cards", "the stock market", "supply and demand", "trade",
    "unemployment", "poverty", "charity", "volunteering", "human rights", "the constitution",
    "courts", "the police", "war", "peace", "the Cold War", "the French Revolution", "Vikings",
    "knights", "pirates", "samurai", "the Silk Road", "ancient Egypt", "the Maya",
    "mythology", "fairy tales", "folk songs", "opera", "the violin", "drums", "choirs",
    "sculpture", "architecture", "cartoons", "comics", "puzzles", "card games", "board games",
    "tennis", "baseball", "skiing", "surfing", "climbing", "martial arts", "the Olympics",
    "marathons", "walking", "stretching", "posture", "back pain", "colds", "fever", "diabetes",
    "blood pressure", "first aid", "sunscreen", "hand washing", "toothbrushing", "glasses",
    "cats and dogs", "horses", "cows", "sheep", "chickens", "owls", "eagles", "parrots", "ducks",
    "frogs", "snakes", "turtles", "lizards", "sharks", "octopuses", "jellyfish", "ants",
    "butterflies", "spiders", "bats", "bears", "wolves", "foxes", "lions", "tigers", "monkeys",
    "kangaroos", "pandas", "apples", "bananas", "oranges", "berries", "tomatoes", "potatoes",
    "onions", "garlic", "carrots", "mushrooms", "rice", "noodles", "beans", "eggs", "milk",
    "butter", "yogurt", "ice cream", "cakes", "cookies", "pancakes", "sandwiches", "barbecue",
    "spices", "olive oil", "vinegar", "picnics", "restaurants", "supermarkets", "markets",
    "online shopping", "second-hand clothes", "knitting", "sewing", "pottery", "woodworking",
    "home repairs", "cleaning", "laundry", "moving house", "neighbours", "apartments", "pets",
    "babies", "teenagers", "grandparents", "siblings", "marriage", "college", "exams",
    "scholarships", "essays", "book clubs", "diaries", "handwriting", "spelling", "vocabulary",
    "punctuation", "sign language", "German", "Chinese", "algebra", "probability", "graphs",
    "logic", "prime numbers", "percentages", "the metric system", "algorithms", "recursion",
    "web pages", "spreadsheets", "operating systems", "search engines", "neural networks",
    "open source software", "version control", "data privacy", "fake news", "podcasts",
    "television", "radio", "cinema", "documentaries", "theme parks", "zoos", "aquariums",
    "beaches", "road trips", "backpacks", "tents", "hotels", "passports", "jet lag", "souvenirs",
    "wind energy", "nuclear power", "oil", "coal", "fuel", "pollution", "endangered animals",
    "coral reefs", "composting", "bees and flowers", "national parks", "the ozone layer",
]
# About one topic, or two.
REQUESTS = [
    "Explain how {} works.", "What is {}?", "Tell me about {}.", "Why is {} important?",
    "Give me five tips about {}.", "Give me three interesting facts about {}.",
    "Write a short story about {}.", "Write a poem about {}.",
    "What are the advantages and disadvantages of {}?", "Describe {} to a child.",
    "Explain {} in simple terms.", "What are the most common mistakes people make with {}?",
    "How can I learn more about {}?", "Write a short paragraph about {}.",
    "Summarize the history of {}.", "What should a beginner know about {}?",
    "List the main types of {}.", "Write a blog post introduction about {}.",
    "How has {} changed over time?", "What is the difference between {} and {}?",
    "Compare {} and {}.", "Write a dialogue between two friends about {}.",
    "How do I talk to my children about {}?", "Can you help me understand {}?",
    "I have to give a presentation about {}. What should I say?",
    "What are some good questions to ask about {}?", "How does {} affect our daily life?",
    "Write a funny joke about {}.", "Create a weekly plan around {}.",
    "Suggest some activities related to {}.", "What equipment do I need for {}?",
    "Why do people like {}?", "What is the future of {}?",
    "Write a product description for something related to {}.",
    "Explain why {} matters to families.", "How do {} and {} depend on each other?",
    "Give me seven ideas for a lesson about {}.", "Write a speech about {}.",
    "Tell me a bedtime story with {} in it.", "Write a haiku about {}.", "Write a song about {}.",
    "What would the world be like without {}?", "Give me a short definition of {}.",
    "Explain the science behind {}.", "How did people discover {}?",
    "What are the benefits of {}?", "What are the risks of {}?", "What problems does {} solve?",
    "Write a news article about {}.", "Write a review about {}.", "Write an essay about {}.",
    "Describe {} in three sentences.", "Make a list of words related to {}.",
    "What are common myths about {}?", "Which books should I read about {}?",
    "What does a day with {} look like?", "How much does {} usually cost?",
    "How can I teach {} to a class of ten-year-olds?", "What is the best way to start with {}?",
    "How do experts think about {}?",
    "Write a conversation between a teacher and a student about {}.",
    "Write the opening of a novel about {}.", "Give me a metaphor for {}.",
    "Write a short letter from someone who loves {}.", "What role does {} play in {}?",
    "Write a tweet about {}.", "Write a quiz with answers about {}.", "Invent a company for {}.",
    "What rules are there for {}?", "How do I choose between {} and {}?",
]
# The same, asked in other ways.
QUESTIONS = [
    "How does {} stay safe?", "What should I pack for a trip to {}?",
    "What are the main differences between {} and {}?", "How do you make {}?",
    "Describe the process of making {}.", "What happens when {} changes?",
    "How can I improve my {}?", "Is {} good for you?", "How old is {}?", "Who invented {}?",
    "Where does {} come from?", "When should I worry about {}?", "Why does {} matter?",
    "Can {} be dangerous?", "What makes {} special?", "How do scientists study {}?",
    "What are the parts of {}?", "Is {} hard to learn?", "What is {} made of?",
    "How do I take care of {}?", "How do I explain {} to my grandmother?",
    "What are the rules of {}?", "How can I save money on {}?", "Is it true that {} is changing?",
    "What do I need to know before I try {}?", "How long does it take to get used to {}?",
]
# A story has somebody in it, and something happens.
STORY_REQUESTS = [
    "Write a short story about {} who {}.", "Tell me a story in which {} {}.",
    "Write the first paragraph of a book about {} who {}.", "Write a funny story: {} {}.",
    "Write a poem about {} who {}.", "Write a scene in which {} {}.",
]
# Who is in it.
HEROES = [
    "a young fisherman", "an old clockmaker", "a shy robot", "two sisters", "a lost dog",
    "a retired pilot", "a curious girl", "a baker", "a night watchman", "a dragon", "a teacher",
    "a gardener", "a mountain guide", "a violinist", "a nurse", "a bus driver", "a sailor",
    "a boy with a red hat", "a librarian", "a detective", "a king", "a mouse", "a painter",
    "an astronaut", "a farmer", "a grandmother", "a thief", "a photographer", "a little fox",
]
# What happens.
EVENTS = [
    "finds an old map", "gets lost in a forest", "wakes up in another century",
    "loses something important", "learns to dance", "makes a new friend", "opens a small shop",
    "receives a strange letter", "saves the village", "meets a talking cat",
    "discovers a hidden door", "wants to see the ocean", "forgets a promise",
    "is afraid of the dark", "builds a boat", "hears music at night", "must tell the truth",
    "wins a contest", "travels to the moon", "plants a magic seed", "misses the last train",
    "keeps a secret", "goes home after many years", "solves a mystery", "breaks a rule",
]
# Known to most people, so that a model can retell it.
WORKS = [
    "Snow White", "Little Red Riding Hood", "Hansel and Gretel", "Pinocchio", "Peter Pan",
    "Romeo and Juliet", "Hamlet", "The Lion King", "The Odyssey", "Robin Hood", "King Arthur",
    "Alice in Wonderland", "Frankenstein", "Moby Dick", "The Three Little Pigs", "Aladdin",
    "Beauty and the Beast", "Sleeping Beauty", "Robinson Crusoe", "The Ugly Duckling",
    "The Tortoise and the Hare", "Sherlock Holmes", "Gulliver's Travels", "Don Quixote",
]
# What is asked of them.
WORK_REQUESTS = [
    "Summarize {} in a short paragraph.", "What is the moral of {}?", "Retell {} for children.",
    "Who are the main characters of {}?", "Write a different ending for {}.",
    "Why is {} still popular?", "Tell me the story of {}.", "Describe the hero of {}.",
]
# What people get ready for.
OCCASIONS = [
    "a day at the beach", "a camping trip", "a business trip", "a city trip in winter",
    "a picnic with friends", "the first day at school", "a job interview", "a birthday party",
    "a long flight", "a road trip with children", "a marathon", "a visit to the museum",
    "a cooking evening", "moving to a new city", "a garden party", "a week without internet",
    "a small wedding", "a science fair", "a family dinner", "a rainy weekend",
]
# What they want to know.
PLAN_REQUESTS = [
    "What should I bring to {}?", "Make a checklist for {}.", "Help me plan {}.",
    "How do I prepare for {}?", "What can go wrong at {}?", "Give me ideas for {}.",
    "Write an invitation to {}.", "What should I wear for {}?", "Write a schedule for {}.",
]
# To somebody, about something.
LETTERS = [
    "Write a polite email to my {} asking for {}.", "Write a letter to my {} about {}.",
    "How do I ask my {} for {}?",
]
# Who gets a letter.
PEOPLE = [
    "boss", "landlord", "teacher", "colleague", "neighbour", "customer", "doctor", "friend",
    "manager", "professor",
]
# What a letter is about.
MATTERS = [
    "a day off", "a refund", "more time", "help with a project", "a meeting next week",
    "a repair", "feedback", "advice", "a recommendation", "an apology", "a new schedule",
    "information about the course",
]
# For code.
CODE_REQUESTS = [
    "Write a Python function that {}.", "How do I write a program that {}?",
    "Write a JavaScript function that {}.", "Show me Python code that {} and explain it.",
    "Write a function which {} and add comments.",
]
# What the code does.
FUNCTIONS = [
    "reverses a string", "checks if a number is prime", "sorts a list of numbers",
    "counts the words in a text", "finds the largest number in a list",
    "computes the factorial of a number", "removes duplicates from a list",
    "reads a file line by line", "converts Celsius to Fahrenheit",
    "checks whether a word is an anagram of another", "returns the n largest items",
    "merges two dictionaries", "computes the average of a list",
    "finds the longest word in a sentence", "generates a random password",
    "counts vowels in a string", "flattens a nested list",
    "computes the greatest common divisor", "validates an email address",
    "draws a triangle of stars", "computes the sum of the digits of a number",
    "prints a multiplication table", "checks if a string is a palindrome", "solves FizzBuzz",
    "finds the second largest number", "converts a number to binary", "sorts words by length",
    "computes compound interest", "counts how often each letter occurs", "rolls two dice",
    "finds the intersection of two lists", "implements a stack", "implements binary search",
    "rotates a list", "computes the area of a circle", "reads a CSV file", "guesses a number",
    "formats a date", "prints the first n square numbers", "capitalizes every word",
]
# For a meal.
MEAL_REQUESTS = [
    "Suggest a simple dinner with {}.", "Give me a recipe with {}.", "How do I cook {}?",
    "What can I make with {}?",
]
# What is in the kitchen.
INGREDIENTS = [
    "chicken and rice", "eggs and potatoes", "pasta and mushrooms", "lentils", "fish and lemon",
    "apples and cinnamon", "chickpeas", "tofu and vegetables", "beef and carrots",
    "oats and berries", "spinach and cheese", "pumpkin", "leftover bread", "sweet potatoes",
    "black beans and corn", "salmon and broccoli", "zucchini", "peanut butter", "bananas",
    "tuna and noodles", "cabbage", "peppers and onions", "coconut milk", "avocado", "turkey",
]
# How it should be; most people don't say.
WISHES = [
    "", "", "", "Please be brief. ", " In a few sentences.", " Explain step by step.",
    " Use simple words.", " Give examples.",
]
# fmt: on


def everyday_prompts(count: int, seed: int = 0) -> list[str]:
    """``count`` different requests.

    Raises:
        ValueError: more than the templates give with ease (40,000).
    """
    if not 0 < count <= 40_000:
        raise ValueError(f"count={count} must be 1 to 40000")
    rng = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        prompts[_prompt(rng)] = None
    return list(prompts)


def _prompt(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.06:
        text = rng.choice(LETTERS).format(rng.choice(PEOPLE), rng.choice(MATTERS))
    elif kind < 0.13:
        text = rng.choice(CODE_REQUESTS).format(rng.choice(FUNCTIONS))
    elif kind < 0.18:
        text = rng.choice(MEAL_REQUESTS).format(rng.choice(INGREDIENTS))
    elif kind < 0.24:
        text = rng.choice(STORY_REQUESTS).format(rng.choice(HEROES), rng.choice(EVENTS))
    elif kind < 0.27:
        text = rng.choice(WORK_REQUESTS).format(rng.choice(WORKS))
    elif kind < 0.32:
        text = rng.choice(PLAN_REQUESTS).format(rng.choice(OCCASIONS))
    else:
        templates = QUESTIONS if kind < 0.50 else REQUESTS
        text = rng.choice(templates).format(*rng.sample(TOPICS, 2))
    wish = rng.choice(WISHES)
    return wish + text if wish.endswith(". ") else text + wish


def main() -> None:
    """Print 40,000 prompts as JSON lines, which ``hf-specdec train --data`` reads."""
    for prompt in everyday_prompts(40_000):
        print(json.dumps({"prompt": prompt}))


if __name__ == "__main__":
    main()
