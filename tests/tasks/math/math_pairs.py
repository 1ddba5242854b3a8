r"""Labelled by hand: (gold, answer, whether the answer is right), grouped by topic."""

SAME = True
OTHER = False

NUMBERS = [
    ("18", "18", SAME), ("18", "18.0", SAME), ("18", "18.", SAME), ("18", "+18", SAME), ("18", " 18 ", SAME),
    ("18", "1800", OTHER), ("1800", "18", OTHER), ("5", "500", OTHER), ("500", "5", OTHER), ("18", "0.18", OTHER),
    ("18", "-18", OTHER), ("-18", "-18.00", SAME), ("-18", "−18", SAME), ("18", "19", OTHER), ("18", "18.5", OTHER),
    ("0", "-0", SAME), ("0", "0.0000", SAME), ("0.5", ".5", SAME), ("0.5", "0.50", SAME), ("0.5", "0.05", OTHER),
    ("007", "7", SAME), ("123456789", "123456790", OTHER), ("12345678901234567890", "12345678901234567891", OTHER),
    ("12345678901234567890", "12345678901234567890", SAME), ("3", "3.0000001", SAME), ("3", "3.001", OTHER),
    ("3", "2.999", OTHER), ("0.001", "0.002", OTHER), ("0", "0.0005", OTHER),
]  # fmt: skip

SEPARATORS = [
    ("1234", "1,234", SAME), ("1,234", "1234", SAME), ("1234567", "1,234,567", SAME), ("1{,}234", "1234", SAME),
    ("10{,}000", "10000", SAME), (r"1,\!234", "1234", SAME), (r"1\,234", "1234", SAME), ("12", "1 2", OTHER),
    ("1,234.5", "1234.5", SAME), ("1234", "1,235", OTHER),
    ("1234", "12,34", OTHER), ("100, 200", "100,200", SAME), ("1,000, 2", "2, 1000", SAME), ("1000", "1.000", OTHER),
]  # fmt: skip

FRACTIONS = [
    ("1/2", "0.5", SAME), ("0.5", r"\frac{1}{2}", SAME), (r"\frac12", "0.5", SAME),
    (r"\dfrac{1}{2}", r"\tfrac12", SAME),
    (r"\frac{1}{2}", r"\frac{2}{4}", SAME), (r"-\frac{1}{2}", r"\frac{-1}{2}", SAME), (r"\frac{1}{-2}", "-0.5", SAME),
    (r"\frac{1}{2}", r"\frac{1}{3}", OTHER), (r"\frac{1}{2}", "2", OTHER), (r"\frac{1}{2}", "12", OTHER),
    (r"\frac{1}{2}", "1", OTHER),
    (r"\frac{1}{3}", "0.333333", SAME), (r"\frac{1}{3}", "0.3333333333", SAME), (r"\frac{1}{3}", "0.33", OTHER),
    (r"\frac{2}{3}", "0.67", OTHER),
    (r"1\frac{1}{2}", "1.5", SAME), (r"1\frac{1}{2}", r"\frac{3}{2}", SAME), ("1 1/2", "3/2", SAME),
    (r"2\frac{3}{4}", "11/4", SAME),
    (r"1\frac{1}{2}", r"\frac{1}{2}", OTHER), (r"-1\frac{1}{2}", "-1.5", SAME), (r"-1\frac{1}{2}", "-0.5", OTHER),
    ("½", "0.5", SAME),
    (r"0.\overline{3}", r"\frac{1}{3}", SAME), (r"0.1\overline{6}", "1/6", SAME),
    (r"0.\overline{27}", r"\frac{3}{11}", SAME), (r"0.\overline{3}", "0.3", OTHER),
    (r"\frac{1}{0}", "0", OTHER), ("3/4", "4/3", OTHER), (r"\frac{3}{4}", "3/4", SAME), (r"\frac 3 4", "0.75", SAME),
    (r"-(1/3)", "-1/3", SAME),
]  # fmt: skip

POWERS = [
    (r"1.5\times10^{3}", "1500", SAME), ("1.5e3", "1500", SAME), (r"3\times 10^{-4}", "0.0003", SAME),
    (r"10^{6}", "1000000", SAME), ("10^6", "1,000,000", SAME),
    (r"2 \cdot 10^5", "200000", SAME), (r"1.5\times10^{3}", "150", OTHER), ("1e3", "1e4", OTHER),
    ("2^{10}", "1024", SAME), ("2^10", "1024", SAME), ("2**10", "1024", SAME),
    ("2^{10}", "20", OTHER), ("2^{-1}", "0.5", SAME), (r"6.02\times10^{23}", "6.02e23", SAME),
    (r"1.5\times10^{3}", r"15\times10^{2}", SAME),
]  # fmt: skip

PERCENT = [
    ("50", r"50\%", SAME), (r"50\%", "50", SAME), ("50%", "0.5", SAME), ("0.5", r"50\%", SAME), ("50%", "5", OTHER),
    ("50%", "50%", SAME), ("50%", "500%", OTHER),
    ("50", "0.5", OTHER), ("0.5", "50", OTHER), (r"12.5\%", "12.5", SAME), (r"12.5\%", "0.125", SAME),
]  # fmt: skip

ROOTS = [
    (r"\sqrt{2}", r"\sqrt2", SAME), (r"\sqrt{2}", "sqrt(2)", SAME), (r"\sqrt{8}", r"2\sqrt{2}", SAME),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", SAME), (r"\sqrt{2}", "1.414214", SAME),
    (r"\sqrt{2}", "1.41", OTHER), (r"\sqrt{2}", r"\sqrt{3}", OTHER), (r"\sqrt{2}", "2", OTHER),
    (r"\sqrt{4}", "2", SAME), (r"\sqrt[3]{27}", "3", SAME), (r"\sqrt[3]{2}", r"\sqrt{2}", OTHER),
    (r"2\sqrt{3}", "2*sqrt(3)", SAME), (r"3+\sqrt{5}", r"\sqrt{5}+3", SAME), (r"3+\sqrt{5}", r"3-\sqrt{5}", OTHER),
    (r"\frac{3}{\sqrt{3}}", r"\sqrt{3}", SAME), (r"√2", r"\sqrt{2}", SAME),
]  # fmt: skip

CONSTANTS = [
    (r"\pi", "pi", SAME), (r"2\pi", r"\pi\cdot 2", SAME), (r"2\pi", "6.283185", SAME), (r"2\pi", "6.28", OTHER),
    (r"\frac{\pi}{4}", r"\pi/4", SAME), (r"π", r"\pi", SAME), (r"\pi", "3", OTHER),
    ("e^2", "e^{2}", SAME), ("e^2", "2e", OTHER), (r"\ln 2", r"\ln(2)", SAME), (r"\log_2 8", "3", SAME),
    (r"\log_2 8", "4", OTHER), ("5!", "120", SAME), (r"\binom{5}{2}", "10", SAME), (r"\binom{5}{2}", "20", OTHER),
    (r"\sin 30^\circ", r"\sin 30^{\circ}", SAME), ("3+4i", "4i+3", SAME), ("3+4i", "3-4i", OTHER),
    ("(1+i)^2", "2i", SAME), (r"\infty", r"+\infty", SAME), (r"\infty", "infinity", SAME),
    (r"\infty", r"-\infty", OTHER),
]  # fmt: skip

ALGEBRA = [
    ("(x+1)^2", "x^2+2x+1", SAME), ("(x+1)^2", "x^2+1", OTHER), ("x^2-1", "(x-1)(x+1)", SAME), ("3a+2b", "2b+3a", SAME),
    ("3a", "3A", OTHER), ("a", "A", OTHER), ("x", "y", OTHER), ("3x", "3y", OTHER),
    ("2x", "x*2", SAME), (r"\frac{x}{2}", "0.5x", SAME), (r"\frac{x+1}{2}", r"\frac{1}{2}(x+1)", SAME),
    ("x^{10}", "x^10", SAME), ("x^2", "x^3", OTHER), ("-x", "x", OTHER), (r"|x|", "x", OTHER), ("x_1", "x_2", OTHER),
    ("x_1", "x_{1}", SAME),
    (r"\sin^2 x+\cos^2 x", "1", SAME), ("2(x+3)", "2x+6", SAME), ("2(x+3)", "2x+3", OTHER),
    (r"\frac{1}{x}", "x^{-1}", SAME), ("n(n+1)/2", r"\frac{n^2+n}{2}", SAME), ("2-5", "-3", SAME), ("2-5", "-5", OTHER),
    ("2+3", "5", SAME),
]  # fmt: skip

TUPLES = [
    ("(1,2)", "(1, 2)", SAME), ("(1,2)", r"\left(1,2\right)", SAME), ("(1,2)", "(2,1)", OTHER),
    ("(1,2)", "[1,2]", OTHER), ("(1,2)", "(1,2]", OTHER), ("(1,2)", "(1,2,3)", OTHER), ("(1,2)", "1,2", OTHER),
    ("(1,2)", "1", OTHER),
    ("(1,2)", r"\{1,2\}", OTHER), ("(0.5,2)", r"\left(\frac12,2\right)", SAME),
    (r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", SAME), (r"(3,\frac{\pi}{2})", r"(3,\pi)", OTHER),
    ("(x,y)=(1,2)", "(1,2)", SAME),
    ("(1,2),(3,4)", "(3,4),(1,2)", SAME), ("(1,2),(3,4)", "(1,2)", OTHER), ("((1,2),3)", "((1, 2), 3)", SAME),
    ("(1,234)", "(1, 234)", SAME),
]  # fmt: skip

INTERVALS = [
    ("[2,5)", "[2, 5)", SAME), ("[2,5)", "[2,5]", OTHER), ("[2,5)", "(2,5)", OTHER),
    (r"(-\infty,3]", r"(-\infty, 3]", SAME), (r"(-\infty,3]", r"(-infinity,3]", SAME),
    (r"(-\infty,3]", r"(-\infty,3)", OTHER), (r"(3,\infty)", r"(3,+\infty)", SAME),
    (r"(3,\infty)", "x>3", SAME), ("x>3", r"(3,\infty)", SAME), (r"[2,5)", r"2\le x<5", SAME),
    (r"[2,5)", r"2\leq x\leq 5", OTHER), (r"x\in[2,5)", "[2,5)", SAME), (r"(-\infty,2]", r"x \leqslant 2", SAME),
    ("x>3", "3<x", SAME), ("x>3", "x<3", OTHER), ("2x>6", "x>3", SAME),
    (r"(0,1)\cup(2,3)", r"(2,3)\cup(0,1)", SAME), (r"(0,1)\cup(2,3)", r"(0,1)\cup(2,4)", OTHER),
    (r"(0,1)\cup(2,3)", "(0,1)", OTHER), (r"(-\infty,0)\cup(0,\infty)", r"(-\infty, 0) \cup (0, \infty)", SAME),
    (r"(0,1)∪(2,3)", r"(0,1)\cup(2,3)", SAME),
]  # fmt: skip

SETS = [
    (r"\{1,2\}", r"\{2,1\}", SAME), (r"\{1,2\}", "1, 2", SAME), ("1,2", "2,1", SAME), ("1,2", "2 and 1", SAME),
    (r"1 \text{ and } 2", "1, 2", SAME), ("1,2", r"1\text{ or }2", SAME), ("1,2", "1,2,3", OTHER),
    ("1,2,3", "1,2", OTHER), ("1,2", "1", OTHER), ("1", "1,2", OTHER),
    (r"\{1,2\}", r"\{1,3\}", OTHER), (r"1\pm\sqrt{2}", r"1+\sqrt{2}, 1-\sqrt{2}", SAME),
    (r"1\pm\sqrt{2}", r"1+\sqrt{2}", OTHER), (r"\pm 3", "3,-3", SAME), ("3,-3", r"\pm3", SAME), (r"\pm 3", "3", OTHER),
    ("1, 1", "1", SAME), (r"\{\frac12, 3\}", "3, 0.5", SAME),
    ("x=1, x=2", "1,2", SAME), ("x=1, y=2", "x=2, y=1", OTHER), ("x=1, y=2", "y=2, x=1", SAME),
    (r"\varnothing", r"\emptyset", SAME), (r"\sqrt{2},\sqrt{3}", r"\sqrt{3}, \sqrt{2}", SAME),
]  # fmt: skip

MATRICES = [
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", SAME),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", SAME),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", OTHER),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}", OTHER),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)", OTHER),
    (r"\begin{pmatrix}\frac12\\2\end{pmatrix}", r"\begin{pmatrix}0.5\\2\end{pmatrix}", SAME),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", OTHER),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2", OTHER),
]  # fmt: skip

EQUATIONS = [
    ("5", "x=5", SAME), ("x=5", "5", SAME), ("x=5", "x = 5", SAME), ("x=5", "y=5", OTHER), ("x=5", "x=6", OTHER),
    ("5", "x = 2+3 = 5", SAME), ("y=2x+1", "y = 1 + 2x", SAME), ("y=2x+1", "2x-y+1=0", SAME),
    ("y=2x+1", "y=2x-1", OTHER), ("3x+2y=6", "6x+4y=12", SAME), ("3x+2y=6", "3x+2y=7", OTHER),
    ("f(x)=x^2", "x^2", SAME), ("x^2", "f(x)=x^2", SAME), ("x^2=4", "x=2", OTHER), ("y=x+1", "x+1", SAME),
    ("x^2+y^2=9", "y^2+x^2=9", SAME), ("x^2+y^2=9", "9", OTHER), ("3+2=5", "5", OTHER), ("5", "3+2=5", SAME),
]  # fmt: skip

UNITS = [
    ("5", "5 cm", SAME), ("5 cm", "5", SAME), (r"5\text{ cm}", "5cm", SAME), ("5 cm", "5 m", OTHER),
    ("5 cm", "5 centimeters", SAME), (r"12\text{ cm}^2", "12", SAME),
    (r"12\text{ cm}^2", "12 square centimeters", SAME), (r"12\text{ cm}^2", "12 cm", OTHER), ("18", "$18", SAME),
    ("18", r"\$18", SAME), ("18", "18 dollars", SAME),
    ("18", "$18.00", SAME), ("9 (apples)", "9", SAME), ("9 (apples)", "9 apples", SAME),
    ("9 (apples)", "8 apples", OTHER), ("90^\\circ", "90", SAME), ("90", "90°", SAME),
    ("90^\\circ", "90 degrees", SAME), (r"164\pi", r"164\pi\mbox{ square feet}", SAME), ("12", "12 square units", SAME),
    ("3", "3 hours", SAME), ("3 hours", "3 minutes", OTHER),
    ("60", "60 mph", SAME), (r"25\,\mathrm{km/h}", "25", SAME), ("3:30 p.m.", "3:30 pm", SAME),
    ("3:30 p.m.", "3:30", SAME), ("3:30 p.m.", "3:30 a.m.", OTHER), ("3:30", "4:30", OTHER), ("3:2", "2:3", OTHER),
]  # fmt: skip

WORDS = [
    ("Monday", r"\text{Monday}", SAME), ("Monday", "monday", SAME), ("Monday", "Tuesday", OTHER),
    (r"\text{even}", "even", SAME), (r"\text{even}", "odd", OTHER), ("Mrs. Hilt", "Mrs. Hilt.", SAME),
    ("A", "(A)", SAME), (r"\text{(A)}", "A", SAME), ("A", "B", OTHER), ("(A)", "(B)", OTHER), ("yes", "Yes.", SAME),
    ("yes", "no", OTHER),
    (r"\mbox{four}", "4", SAME), ("4", "four", SAME), ("4", "five", OTHER), ("east", "5", OTHER),
    ("1010_2", "1010_{2}", SAME), ("1010_2", "1010", SAME), ("1010_2", "1010_3", OTHER), ("1010_2", "1011_2", OTHER),
]  # fmt: skip

# Numbers with subscripts, and numbers in other scripts, groups and words.
UNDER = [
    ("40", r"40\text{ base 9}", OTHER), ("40", r"40\text{ (base nine)}", OTHER), ("40", r"40\text{_9}", OTHER),
    ("40", "40 (base 9)", OTHER), ("40_9", r"40\text{ base } 9", SAME), ("40", "101000 base 2", SAME),
    ("3", r"3\text{ base hits}", SAME), ("a_1", "a", OTHER), ("b_2", "b", OTHER), ("A_{16}", "A", SAME),
    ("1,000", "1,000_2", OTHER), ("40", "40_9", OTHER), ("40", "40_{9}", OTHER), ("40", "{40}_{9}", OTHER),
    ("40", "40_x", OTHER), ("40", r"40_{\text{nine}}", OTHER), ("40", "40_{10}", SAME), ("40", "101000_2", SAME),
    ("9", r"11_{\text{eight}}", SAME), ("40_9", "40", SAME), ("14_5", "9", OTHER), ("42", "2A_{16}", SAME),
    ("11_8", r"11_{\text{eight}}", SAME), ("1010_2+1", "1011", OTHER), ("x_1", "x", OTHER), ("40", "４０", SAME),
    ("40", "٤٠", SAME), ("(1,2)", "（１，２）", SAME), ("22", "2²", OTHER),
    ("4000", "4 000", SAME),
    ("40", "4 0", OTHER),
    ("12 345 678", "12345678", SAME), ("123", "1,23", OTHER), ("1.23", "1,23", OTHER), ("42", "forty-two", SAME),
    ("42", "forty", OTHER), ("5000000", "5 million", SAME), ("5", "5 million", OTHER),
    (r"5.2\text{ million}", "5200000", SAME), ("24", "2 dozen", SAME), ("5 cents", r"\$5", OTHER),
    ("40", r"\approx 40", SAME),
]  # fmt: skip

COMPLEX = [
    ("i", r"\sqrt{-1}", SAME), (r"\sqrt{-1}", "i", SAME), ("2i", r"\sqrt{-4}", SAME),
    (r"\sqrt{-3}", r"\sqrt{3}i", SAME), (r"\sqrt{-3}", r"\sqrt{3}", OTHER), ("i", "-i", OTHER),
    ("i", r"-\sqrt{-1}", OTHER), ("i", "1", OTHER), ("2", r"\sqrt{-4}", OTHER), (r"1+\sqrt{2}i", r"1+\sqrt{-2}", SAME),
    ("i,-i", r"\pm\sqrt{-1}", SAME),
    ("i", r"e^{\frac{\pi i}{2}}", SAME), ("i", r"\imath", SAME), ("3+4i", r"3+4\mathrm{i}", SAME),
    ("3+4i", "3+4j", OTHER), ("i", "I", OTHER), ("-1", "i^2", SAME), (r"\frac{1+i}{2}", "0.5+0.5i", SAME),
    ("x", r"\frac{2x}{2}", SAME), ("x", "x+1", OTHER), ("e", r"\exp(1)", SAME), ("A", r"\frac{1}{2}", OTHER),
    ("(1,2)", "1<x<2", SAME), (r"(2,\infty)", "2<x", SAME), ("40", "40=x", SAME),
]  # fmt: skip

NOTHING = [
    ("", "", OTHER),
    ("5", "", OTHER),
    ("", "5", OTHER),
    (" ", " ", OTHER),
    ("5", "?", OTHER),
    ("5", "...", OTHER),
    ("5", r"\text{}", OTHER),
]

PAIRS = [
    *NUMBERS, *SEPARATORS, *FRACTIONS, *POWERS, *PERCENT, *ROOTS, *CONSTANTS, *ALGEBRA, *TUPLES, *INTERVALS, *SETS,
    *MATRICES, *EQUATIONS,
    *UNITS, *WORDS, *UNDER, *COMPLEX, *NOTHING,
]  # fmt: skip

# (response, gold, marker asked for, right)
RESPONSES = [
    ("So it is 72.\n#### 72", "72", "hash", SAME), ("#### 7\nwait\n#### 8", "8", "hash", SAME),
    ("#### 7\nwait\n#### 8", "7", "hash", OTHER), ("The answer is 5.\n#### 7", "7", "hash", SAME),
    (r"\boxed{5}" + "\n#### 7", "7", "hash", SAME),
    (r"\boxed{5}" + "\n#### 7", "5", "boxed", SAME), ("#### 1,234 dollars", "1234", "hash", SAME),
    ("#### $18", "18", "hash", SAME), ("#### 1800", "18", "hash", OTHER), ("#### 500", "5", "hash", OTHER),
    ("####18", "18", "hash", SAME), ("#### ", "0", "hash", OTHER),
    (r"so $x=\boxed{3}$.", "3", "boxed", SAME), (r"\boxed{50}%", "50", "boxed", SAME),
    (r"\boxed{50}\%", "50", "boxed", SAME), (r"\boxed 2", "2", "boxed", SAME),
    (r"it is $\boxed 2$.", "2", "boxed", SAME), (r"\fbox{7}", "7", "boxed", SAME),
    (r"\boxed{\frac{1}{2}}", "0.5", "boxed", SAME),
    (r"\boxed{1} no, \boxed{2}", "2", "boxed", SAME), (r"\boxed{1} no, \boxed{2}", "1", "boxed", OTHER),
    (r"$\boxed{3}$ or $\boxed{-3}$", "3,-3", "boxed", SAME), (r"$\boxed{3}$ or $\boxed{-3}$", "3", "boxed", OTHER),
    (r"$x=\boxed{1}$ and $y=\boxed{1}$", "1", "boxed", SAME), (r"\boxed{}", "", "boxed", OTHER),
    (r"\boxed{", "5", "boxed", OTHER),
    (r"\boxed{\boxed{4}}", "4", "boxed", SAME), (r"The final answer is $\frac12$. I hope it is correct.", "0.5",
    "boxed", SAME), ("The answer is 42.", "42", "boxed", SAME), ("The answer is: 3.5 meters.", "3.5", "boxed", SAME),
    ("the answer is $x^2$, as shown", "x^2", "boxed", SAME), ("The answer is 5\nbut 7", "5", "boxed", SAME),
    ("```output\n12\n```", "12", "boxed", SAME), ("They walk 3 miles, then 4, in all 7", "7", "hash", SAME),
    ("pages 2-5", "-5", "hash", OTHER), ("pages 2-5", "5", "hash", SAME), ("2-5", "-5", "hash", OTHER),
    ("2-5", "-3", "hash", SAME), ("it is -5", "-5", "hash", SAME), ("a total of 1,234 apples", "1234", "hash", SAME),
    ("It costs 3.50.", "3.5", "hash", SAME),
    ("I do not know", "0", "hash", OTHER), ("", "0", "hash", OTHER), (r"\frac{3}{4}", "0.75", "boxed", SAME),
    ("x = 5", "5", "boxed", SAME), ("the share is 3/4", "0.75", "boxed", SAME), ("about 50%", "50", "boxed", SAME),
    ("v1.2.3", "3", "hash", OTHER),
    ("#### 40_9", "40", "hash", OTHER), (r"\boxed{40}_9", "40", "boxed", OTHER),
    (r"$\boxed{40}_{9}$", "40_9", "boxed", SAME), ("it is 40_9", "40", "hash", OTHER),
    ("so it is 5 million", "5", "hash", OTHER), ("so it is 5 million", "5000000", "hash", SAME),
    ("it is 40^2", "2", "hash", OTHER), (r"\boxed{i}", r"\sqrt{-1}", "boxed", SAME),
]  # fmt: skip

# These must not hang, crash or count as right.
HOSTILE = [
    "9**9**9", "9^{9^{9}}", "9^{9^{9^{9}}}", "((((9!)!)!)!)!", "2^{2^{2^{2^{2^{2}}}}}",
    r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}", r"\int_0^1 x^{x^{x^{x}}} dx", r"\prod_{n=1}^{10^{9}} n", "1e999999999",
    "1" * 100_000, "{" * 50_000, "(" * 50_000, "((" * 900 + "1" + "))" * 900, r"\frac{" * 20_000,
    r"\boxed{" * 20_000, r"\boxed{1}" + " " * 50_000 + r"x\boxed{2}", "\x00", "\x00" * 1000 + "5\x00", "\ud800",
    "a" * 50_000, "a " * 900, "1," * 900, "(1," * 300 + ")" * 300, "$" * 10_000, "\\" * 10_001, r"\text{" * 300,
    "#### " * 1000, "__import__('os').system('true')", r"\input{/etc/passwd}", "x" + "^x" * 400,
    r"\sqrt{" * 400 + "}" * 400, "1+" * 900 + "1",
]  # fmt: skip
