"""Lines of repeated messages."""

from common.repeats import MAX_REASONS, Repeats


def test_each_reason_is_reported_at_doubling_counts_and_few_reasons_are_kept():
    repeats = Repeats()
    assert [repeats.count(f"port {port}: refused") for port in range(5)] == [1, 2, None, 4, None]
    assert repeats.count("another reason") == 1
    words = [chr(97 + number % 26) * (1 + number // 26) for number in range(2 * MAX_REASONS)]
    reported = [count for count in map(repeats.count, words) if count is not None]
    assert reported.count(1) <= MAX_REASONS and len(repeats._counts) <= MAX_REASONS + 1
