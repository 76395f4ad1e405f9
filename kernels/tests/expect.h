// A test is a program: it prints each failed expectation and returns their number.
#ifndef NVFP4_TESTS_EXPECT_H_
#define NVFP4_TESTS_EXPECT_H_

#include <cstdio>

namespace nvfp4::test {

inline int failures = 0;

inline void Expect(bool holds, const char* file, int line, const char* text) {
  if (!holds) {
    ++failures;
    std::fprintf(stderr, "%s:%d: expected %s\n", file, line, text);
  }
}

inline int Result() { return failures == 0 ? 0 : 1; }

}  // namespace nvfp4::test

#define EXPECT(condition) ::nvfp4::test::Expect((condition), __FILE__, __LINE__, #condition)

#endif  // NVFP4_TESTS_EXPECT_H_
