# Copyright 2026 The hf_falcon authors. Licensed under the Apache License, Version 2.0.
"""Prompts of the package's own, written for it: an instant drafter is fitted to a target's responses to them."""

# Kinds take turns, so that the first prompts of the list are of all kinds. None is of MT-bench, HumanEval or GSM8K.
PROMPTS = (
    "What should I cook on a rainy Sunday with potatoes, leeks and a little cream? Give me one recipe.",
    "Write a Python function that counts how many lines of a file contain a given word. Explain it in short.",
    "A shop sells pens for 3 dollars each and notebooks for twice as much. Mara buys 4 pens and 5 notebooks. How much "
    "does she pay? Think step by step.",
    "Why do leaves turn red and yellow in autumn?",
    "Write a friendly email to my landlord: the heating in the bedroom has been cold for three days.",
    "Summarise in one sentence: The harbour of the village was dredged last winter, because large boats could no "
    "longer enter it. The work took nine weeks and cost more than planned, but the fishermen are glad about it.",
    "Give me ten short names for a bakery that opens at four in the morning.",
    'Complete this function:\n\ndef running_total(values):\n    """Return a list in which each entry is the sum of '
    'all values so far.\n\n    >>> running_total([2, 3, 5])\n    [2, 5, 10]\n    """\n',
    "How does a refrigerator keep food cold? Explain it to a child of eight years.",
    "A tank holds 240 litres. A pump empties 15 litres in a minute, and a hose adds 3 litres in a minute. After how "
    "many minutes is the full tank empty?",
    "Tell a short story about a lighthouse keeper who finds a letter in a bottle.",
    "Translate into French: The library closes at six, but you may return books until midnight.",
    "What is the difference between a virus and a bacterium?",
    "Write a JavaScript function that shuffles an array, and show how to call it.",
    "I have a job interview as a nurse next week. Which questions should I prepare for?",
    "Correct the mistakes in this text: Yesterday me and my sister goes to the market, they was selling apple very "
    "cheap.",
    "Who invented the printing press, and what did it change in Europe?",
    "Complete the code.\n\nfrom typing import List\n\n\ndef without_neighbours(numbers: List[int]) -> List[int]:\n"
    '    """Remove each number that equals the one before it.\n    >>> without_neighbours([1, 1, 2, 2, 1])\n'
    '    [1, 2, 1]\n    """\n',
    "Tom reads 20 pages of a book on Monday, 10 more on Tuesday than on Monday, and half of that on Wednesday. The "
    "book has 150 pages. How many pages are left?",
    "List five exercises for the back that need no equipment, each with one sentence on how to do it.",
    "Write a poem of eight lines about the first snow in a big city.",
    "Explain how vaccines train the immune system.",
    "How do I undo the last commit in git without losing my changes?",
    "Extract all dates and places from this text as a list: On 3 May the choir sang in Lyon, a week later in Turin, "
    "and on 20 June it came home to Basel.",
    "Plan a day for a family with two small children in Lisbon.",
    "What are the advantages and disadvantages of working from home?",
    "Write a class in Python for a bank account with methods to deposit, to withdraw and to show the balance.",
    "A class of 28 pupils goes to the zoo. A ticket is 7 euros for a pupil and 11 euros for each of 3 teachers. The "
    "school pays 50 euros. What is left to pay for each pupil?",
    "Describe the water cycle in a few paragraphs.",
    "Imagine you are a sailor of the year 1600. Tell me about an ordinary day on your ship.",
    "Turn this into a table: Anna is 31 and lives in Oslo, Bruno is 45 and lives in Rome, Chen is 27 and lives in "
    "Taipei.",
    "How can I fall asleep faster in the evening?",
    "Complete this function:\n\ndef initials(name: str) -> str:\n    '''\n    Return the first letters of all words "
    "of a name as capital letters, each followed by a point.\n\n    initials('ada lovelace') gives 'A.L.'\n    '''\n",
    "What happens in the body when we get a fever?",
    "Write a cover letter for a summer job in a garden centre.",
    "If a recipe for 6 people needs 450 grams of rice, how much rice do I need for 10 people? Show the steps.",
    "Name the planets of the solar system in order and say one fact about each.",
    "Is it better to learn the guitar or the piano first? Give arguments for both.",
    "Write an SQL query that finds all customers who have never placed an order.",
    "Continue the story: When Nora opened the old piano, a small grey mouse looked at her and said:",
    "Sort these animals into mammals, birds and fish: trout, bat, penguin, whale, eagle, shark, otter.",
    "What is inflation, and why do central banks care about it?",
    "A train travels 180 kilometres in 2 hours, then 120 kilometres in 1 hour. What is its average speed?",
    "Write a Bash script that renames all .jpeg files of a folder to .jpg.",
    "Give me advice for a good speech at my best friend's wedding.",
    "Explain the difference between weather and climate.",
    "Rewrite this sentence in a more polite way: Send me the report today, I have asked you twice.",
    "Who was Marie Curie? Write a short biography.",
    'Complete the code.\n\ndef is_sorted(items):\n    """\n    True if no item is smaller than the one before it.\n'
    "    An empty list is sorted.\n    >>> is_sorted([1, 2, 2, 7])\n    True\n    >>> is_sorted([3, 1])\n    False\n"
    '    """\n',
    "Lena has three times as many stamps as Paul. Together they have 96 stamps. How many does each of them have?",
    "What should I pack for a week of hiking in the mountains?",
    "How does photosynthesis work? Name its inputs and outputs.",
    "Write a dialogue between a customer and a waiter about a cold soup.",
    "Explain recursion with a simple example in Python.",
    "Which countries share a border with Austria?",
    "A farmer has 12 cows. Each gives 18 litres of milk a day, and he sells a litre for 40 cents. How much money does "
    "he get in a week?",
    "Write a product description for a waterproof backpack of recycled plastic.",
    "What is the moral of the fable of the tortoise and the hare?",
    "Answer from the text: The museum opens at ten, on Thursdays at noon. Tickets are eight euros, and free for "
    "children below twelve. What does a mother with two children of six and nine years pay, and when may she come on "
    "a Thursday?",
    "Write a C function that reverses a string in place.",
    "How do bees make honey?",
    "Give me three ideas for a science project on magnets for a school fair.",
    "There are 5 boxes with 24 eggs each. 17 eggs are broken, and the others are packed by tens. How many full packs "
    "are there?",
    "What is the difference between a list and a tuple in Python?",
    "Write a review of a small hotel where the breakfast was wonderful and the bed was too short.",
    "Why did the Roman Empire fall? Name the main reasons.",
    'Complete this function:\n\ndef most_common_letter(text: str) -> str:\n    """Return the letter that occurs '
    "most often, in lower case; the first one of the alphabet if several do.\n\n    >>> "
    "most_common_letter('Banana')\n    'a'\n    \"\"\"\n",
    "My cat scratches the sofa. What can I do?",
    "Solve for x: 4x + 7 = 35. Explain each step.",
    "Write a haiku about a railway station at night.",
    "How does a search engine find the pages for a query?",
    "What are the rights of a tenant who wants to leave before the contract ends? Answer in general terms.",
    "Classify each review as good or bad: 'Never again.' 'The best shoes I ever had.' 'It broke after a day.'",
    "Write a regular expression that matches a date such as 2024-05-17, and explain its parts.",
    "Compare tea and coffee: taste, effects, culture.",
    "A rectangle is 9 centimetres long and its area is 54 square centimetres. What is its perimeter?",
    "Describe your favourite season as an old painter would.",
    "What do I have to know before I adopt a dog?",
    "Write a Python program that reads a CSV file of names and ages and prints the average age.",
    "How do volcanoes form?",
    "Give me a weekly plan for learning Spanish in half an hour a day.",
    "Lucas earns 12 dollars an hour and works 6 hours on each of 5 days. He saves a quarter of it. How much does he "
    "save in four weeks?",
    "Write the beginning of a detective novel that is set in a library.",
    "Explain what an API is to somebody who has never written a program.",
    "What is the capital of Canada, and why was it chosen?",
    'Complete the code.\n\ndef pairs_with_sum(numbers: list, wanted: int) -> int:\n    """\n    Count the pairs of '
    'different places whose numbers add up to wanted.\n    >>> pairs_with_sum([1, 4, 2, 3], 5)\n    2\n    """\n',
    "Make a shopping list for a vegetarian dinner for four.",
    "What is the difference between speed and acceleration?",
    "Write a message to my team: the meeting of tomorrow moves to Friday at nine.",
    "A cinema has 14 rows of 22 seats. On Saturday three quarters of all seats are sold. How many seats are empty?",
    "How can a small town reduce its waste? Give a list of measures.",
    "Explain the main idea of supply and demand with an example.",
    "Write a Java method that returns the largest of three numbers.",
    "What are common symptoms of a lack of iron?",
    "Tell me a joke about a computer, and explain why it is funny.",
    "Which materials conduct electricity well, and why?",
)
