// Deliberate errors, with which tools/sanitize.py verifies that sanitizers are active and report.
#include <cstdint>

extern "C" {

int32_t read_behind(int64_t count) {
  const int32_t* numbers = new int32_t[count]();
  const int32_t behind = static_cast<const volatile int32_t*>(numbers)[count];
  delete[] numbers;
  return behind;
}

int32_t shift_by(int32_t number, int32_t places) { return number << places; }

}  // extern "C"
