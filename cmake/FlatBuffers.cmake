find_program(FLATC flatc REQUIRED)

# linkcpp_flatbuffers(target schema.fbs): generates ROOM/schema_generated.h, for `#include "ROOM/schema_generated.h"`,
# where ROOM is the folder that the schema stands in. Call it after linkcpp_room().
function(linkcpp_flatbuffers target schema)
  cmake_path(GET CMAKE_CURRENT_SOURCE_DIR FILENAME room)
  cmake_path(GET schema STEM name)
  set(include_root ${CMAKE_CURRENT_BINARY_DIR}/generated)
  set(header ${include_root}/${room}/${name}_generated.h)
  cmake_path(ABSOLUTE_PATH schema)
  add_custom_command(
    OUTPUT ${header}
    COMMAND ${FLATC} --cpp --cpp-std c++17 --scoped-enums --gen-object-api --gen-compare --warnings-as-errors -o ${include_root}/${room} ${schema}
    DEPENDS ${schema} COMMENT "flatc ${room}/${name}.fbs" VERBATIM)
  target_sources(${target} PRIVATE ${header})
  target_include_directories(${target} SYSTEM PUBLIC ${include_root})
endfunction()
